"""fedbench: which defense stops which backdoor in federated learning, and at what cost."""

from pathlib import Path

__version__ = "0.1.0"

# In a clone, `defenses/`, `attacks/`, `backdoors/` and `conf/` are next to this package; in a wheel
# they are inside it.
if not (Path(__file__).parent / "defenses").is_dir():
    __path__.append(str(Path(__file__).parent.parent))
