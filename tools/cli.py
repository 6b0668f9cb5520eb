"""The `main` of generate.py, model.py and tools/serve.py. Each parses its flags before it imports
what loads torch, so a typo is told at once."""

from tools.flags import parse_folder, parse_generate, parse_serve


def main(argv=None):
    """python generate.py: loads, makes an engine, runs it, prints."""
    args = parse_generate(argv)
    from tools.errors import command
    from tools.load import Session
    from tools.printer import Printer, converse
    with command():
        session = Session(args)
        if not session.conversations:
            return converse(session)
        prompts = list(map(session.encode, session.conversations))
        printer = Printer(session, session.engine(prompts))
        output = printer.run(prompts)
        printer.report(output)
        if None in output.ended:
            raise KeyboardInterrupt


def describe(argv=None):
    """python model.py"""
    args = parse_folder(argv)
    from hf.checkpoint import describe
    from tools.errors import command
    with command():
        print(describe(args.folder))


def serve(argv=None):
    """python -m tools.serve"""
    args = parse_serve(argv)
    from tools.errors import command
    from tools.serve import run
    with command():
        run(args)
