"""The options of a search. Imports neither JAX nor numpy, so that `jgt plan --help` and a typo are answered at once."""

from __future__ import annotations

import argparse

SECONDS, TOP = 300, 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a search."""
    group = parser.add_argument_group("search")
    group.add_argument(
        "--search",
        action="store_true",
        help="find the fastest layout for the target: mesh, rules, pipeline, recompute and parts, as far as the file leaves them open",
    )
    group.add_argument("--free", action="store_true", help="search what the file sets, too; values on the command line stay")
    group.add_argument("--time", type=_seconds, default=SECONDS, metavar="S", help=f"seconds that a search may take ({SECONDS})")
    group.add_argument("--top", type=_count, default=TOP, metavar="N", help=f"layouts that fit to plan at least, and to show ({TOP})")
    group.add_argument("--write", metavar="FILE", help="write the best layout as a run's file, which plan, check and train take")
    group.add_argument("--picture", metavar="FILE", help="draw all layouts by time and memory as a PNG; needs matplotlib (extra plot)")
    group.add_argument("--no-cache", action="store_true", help="plan again what earlier searches have planned")
    _add_target_arguments(parser)


def _add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a choice of machines."""
    parser.add_argument("--targets", metavar="A,B", help="search on each of these targets, and compare what they cost")
    parser.add_argument("--tokens", metavar="N", help="the tokens to train on, such as 15T: days, and with --price dollars")
    parser.add_argument("--deadline", type=float, metavar="DAYS", help="with --tokens: how many GPUs are needed to be done in so many days")


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value
