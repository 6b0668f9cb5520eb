"""`python -m bench report DIR`: the records in a folder as Markdown tables, for README.md and
docs/.

A column that is empty in all rows is left out. One that says the same in all of three or more
rows is above the table.
"""

from collections import Counter
from pathlib import Path

from bench import cell, peers
from bench.decoding import DECODING, TEXTS, tree_columns
from bench.kinds import accuracy_table, decoding_columns
from bench.operations import OPERATIONS
from bench.steps import GATHERS, LAUNCHES, STEPS
from model import InputError, read_json

TARGETS = "cuda:80", "cuda:90", "cuda:100", "hip:gfx942"  # for which tests/static.py compiles
STATIC = {name: f"{name} {{}}" for name in ("kernel", "dtype", "tile", "warps", "stages")} | {
    name: f"{name} {{0[registers]}} / {{0[spilled]}} / {{0[shared]}}" for name in TARGETS}

# What each kind of record holds: (title, columns, rows), ...

def decode_tables(record):
    title = f"Decoding {record['model']}, heads {record['heads'][-1]}, {TEXTS[record['text']]}"
    yield f"{title}, temperature {record['temperature']:g}", DECODING, record["decoding"]
    yield ("auto over the best single plan",
           {"batch size": "size {}", "speed-up": "ratio {:.2f}x"},
           [dict(size=size, ratio=ratio) for size, ratio in record["auto_over_best"].items()])
    trees = record.get("trees", {})
    yield ("Tokens per step over tree sizes", tree_columns(next(iter(trees.values()), ())),
           [dict(drafted_by=name) | row for name, row in trees.items()])


def heads_tables(record):
    yield f"Head accuracy, {record['model']}", *accuracy_table(record["accuracy"])
    rows, first = record["decoding"], next(iter(record["accuracy"]))
    if len({row["batch_size"] for row in rows}) == 1:
        yield f"Decoding {record['model']}", decoding_columns(first), rows
        return
    columns = {"batch size": "batch_size {}"} | {
        f"over {over}, T = {size}": f"T{size}.{figure} {{:.2f}}x"
        for figure, over in {"speed_up": "plain", "speed_up_over_first": first}.items()
        for size in dict.fromkeys(row["tree_size"] for row in rows)}
    tables = {}  # title: {batch size: the row of each tree size}
    for row in rows:
        title = f"{row['heads']} over batch sizes, temperature {row['temperature']:g}"
        line = tables.setdefault(title, {}).setdefault(row["batch_size"], {})
        line |= {"batch_size": row["batch_size"], f"T{row['tree_size']}": row}
    for title, lines in tables.items():
        yield title, columns, list(lines.values())


def test_tables(record):
    rows = record["tests"]
    yield (f"pytest -m gpu, {sum(row['seconds'] for row in rows):.0f} seconds",
           {"outcome": "outcome {}", "tests": "tests {}"},
           [dict(outcome=name, tests=count)
            for name, count in Counter(row["outcome"] for row in rows).items()])
    last = lambda row: row.get("error", "-").strip().splitlines()[-1][:100].replace("|", "/")
    yield ("Tests that did not pass",
           {"test": "test {}", "outcome": "outcome {}", "error": "error {}"},
           [row | dict(error=last(row)) for row in rows
            if row["outcome"] not in ("passed", "skipped")])


FORMS = {
    "decode": decode_tables, "heads": heads_tables, "tests": test_tables,
    "decode-random": lambda record: [(
        f"Steps of {record['model']} with random weights",
        STEPS | GATHERS | peers.COLUMNS | LAUNCHES, record["steps"])],
    "kernels": lambda record: [(
        f"{name}, us; {record['copy_gb_per_s']:.0f} GB/s copied", operation.columns,
        record.get(name, [])) for name, operation in OPERATIONS.items()],
    "kernels-static": lambda record: [(
        "Registers per thread / spilled bytes / bytes of shared memory", STATIC,
        record["table"])]}


def markdown(title, columns, rows):
    """The lines of one table; none without rows."""
    cells = {heading: [cell(row, column) for row in rows] for heading, column in columns.items()
             if {cell(row, column) for row in rows} - {"-"}}
    if not cells:
        return []
    same = {heading: column[0] for heading, column in cells.items()
            if len(rows) > 2 and len(set(column)) == 1}
    shown = {heading: column for heading, column in cells.items() if heading not in same}
    above = "; ".join(f"{heading}: {value}" for heading, value in same.items())
    head, *body = ("| " + " | ".join(line) + " |" for line in (shown, *zip(*shown.values())))
    return [f"### {title}", "", *([above, ""] if same else []), head, "|" + " --- |" * len(shown),
            *body, ""]


def lines(record):
    """A record as Markdown. Raises KeyError and its like where it is not what its `bench` says."""
    machine = record["machine"]
    on = [record["dtype"].removeprefix("torch.")] if "dtype" in record else []
    on.append(machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads")
    on += [f"{name} {machine[name]}" for name in ("torch", "triton", "commit") if machine.get(name)]
    return [line for title, columns, rows in FORMS[record["bench"]](record)
            for line in markdown(", ".join([title, *on]), columns, rows)]


def report(path):
    """The lines of one file, with what is wrong with it."""
    try:
        record = read_json(path)
        found = lines(record) if record.get("bench") in FORMS else []
        if "error" in record:
            code, tail = record["error"]["exit_code"], record["error"]["tail"]
            found += [f"{path}: failed, exit code {code}: {(tail or ['no output'])[-1]}", ""]
        elif record.get("bench") not in FORMS:
            raise InputError(f"{path}: left out; expected a record of bench {', '.join(FORMS)}")
        elif not record.get("complete", True):
            found += [f"{path}: not complete; the command that made it goes on with it", ""]
        return found
    except InputError as error:
        return [str(error), ""]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return [f"{path}: left out; not what bench writes ({type(error).__name__}: {error})", ""]


def bench(args):
    """`python -m bench report`: prints all tables."""
    paths = sorted(Path(args.folder).glob("*.json"))
    if not paths:
        raise InputError(f"{args.folder}: expected a folder with .json files, as python -m bench "
                         "--out writes them")
    for path in paths:
        print("\n".join(report(path)))
