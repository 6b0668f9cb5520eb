"""`main` of train_heads.py. Parses the flags before loading torch."""

import sys

from training.flags import parse_heads


def main(argv=None):
    """python train_heads.py"""
    args = parse_heads(argv)
    import train_heads
    from tools.errors import command
    with command():
        if code := train_heads.main(args):
            sys.exit(code)
