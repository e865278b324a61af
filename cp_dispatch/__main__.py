"""Command line of cp_dispatch: plot layouts, or calibrate the cost model for a kind of GPU."""

from __future__ import annotations

import argparse
import sys

from cp_dispatch import plot
from cp_dispatch.costs import calibrate
from cp_dispatch.errors import ContextParallelError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cp_dispatch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    text = "plot which rank owns which rows of a mask, and the work per rank"
    command = commands.add_parser("plot", help=text, description=text)
    plot.add_arguments(command)
    command.set_defaults(run=plot.run)
    text = "measure how long kernels and messages take on this kind of GPU (run under torchrun)"
    command = commands.add_parser("calibrate", help=text, description=text)
    calibrate.add_arguments(command)
    command.set_defaults(run=calibrate.run)
    parsed = parser.parse_args(arguments)
    try:
        parsed.run(parsed)
    except ContextParallelError as error:
        print(f"cp_dispatch {parsed.command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
