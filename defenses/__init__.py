"""One file per defense; those in the working folder's `defenses/` belong to the package, too."""

from fedbench.registry import with_working_folder

__path__ = with_working_folder(__path__, __name__)
