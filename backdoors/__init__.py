"""One file per backdoor; those in the working folder's `backdoors/` belong to the package, too."""

from fedbench.registry import with_working_folder

__path__ = with_working_folder(__path__, __name__)
