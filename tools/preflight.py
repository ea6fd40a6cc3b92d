"""Says, before anything is installed, what this machine lacks, in one command. Runs on any Python 3."""

import os
import shutil
import subprocess
import sys
import sysconfig


def main() -> None:
    if sys.version_info < (3, 10):
        sys.exit(
            "ampkernels needs Python >= 3.10, and %s is %d.%d. Name another: make PYTHON=python3.12"
            % ((sys.executable,) + sys.version_info[:2])
        )
    version = "%d.%d" % sys.version_info[:2]
    packages = []
    if subprocess.call([sys.executable, "-c", "import ensurepip, venv"], stderr=subprocess.DEVNULL):
        packages.append("python%s-venv" % version)
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        packages.append("python%s-dev" % version)
    if not shutil.which((os.environ.get("CXX") or "g++").split()[0]):
        packages.append("g++")
    if packages:
        sys.exit(
            "ampkernels: this machine lacks what the build needs. Run\n    sudo apt install %s" % " ".join(packages)
        )


if __name__ == "__main__":
    main()
