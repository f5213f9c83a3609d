"""The command line of paceline.compat."""

import argparse
import sys

from paceline.compat import _install


def main():
    parser = argparse.ArgumentParser(prog="python -m paceline.compat", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--install", metavar="NAME", choices=sorted(_install.NAMES))
    action.add_argument("--uninstall", metavar="NAME", choices=sorted(_install.NAMES))
    action.add_argument("--list", action="store_true", help="which names there are, and where they are installed")
    parser.add_argument("--target", metavar="DIR", help="a folder on the import path (default: this Python's packages)")
    arguments = parser.parse_args()
    try:
        if arguments.list:
            for name in sorted(_install.NAMES):
                print(f"{name}: {_install.where(name) or 'not installed'}")
        elif arguments.install:
            path = _install.install(arguments.install, arguments.target)
            print(f"'import {arguments.install}' is now Paceline's: {path}")
        else:
            print(f"removed {_install.uninstall(arguments.uninstall, arguments.target)}")
    except _install.CompatError as error:
        sys.exit(f"paceline compat: {error}")


main()
