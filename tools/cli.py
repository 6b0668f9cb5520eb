"""The `main` function of model.py. It parses its flags before it imports torch, so a typo is
reported at once."""

from tools.flags import parse_folder


def describe(argv=None):
    """python model.py"""
    args = parse_folder(argv)
    from hf.checkpoint import describe
    from tools.errors import command
    with command():
        print(describe(args.folder))
