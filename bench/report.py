"""`python -m bench report DIR`: the records in a folder as Markdown tables, for README.md and
docs/.

A column that is empty in all rows is left out. One that says the same in all rows, of three or
more, is above the table.
"""

from collections import Counter
from pathlib import Path

from bench import cell, peers, static
from bench.decoding import DECODING, TEXTS, tree_columns
from bench.kinds import accuracy_table, decoding_columns
from bench.operations import OPERATIONS
from bench.steps import EXACT, LAUNCHES, STEPS
from model import InputError, read_json

# -------------------------------------------------------------------------------------------------
# What a record holds: (title, columns, rows), ...

def decode_tables(record):
    title = f"Decoding {record['model']}, heads {record['heads'][-1]}, {TEXTS[record['text']]}"
    yield f"{title}, temperature {record['temperature']:g}", DECODING, record["decoding"]
    ratios = [dict(size=size, ratio=ratio) for size, ratio in record["auto_over_best"].items()]
    columns = {"batch size": "size {}", "speed-up": "ratio {:.2f}x"}
    yield "auto over the best single plan", columns, ratios
    trees = record.get("trees", {})
    rows = [dict(drafted_by=name) | row for name, row in trees.items()]
    columns = tree_columns(next(iter(trees.values()), ()))
    yield "Tokens per step over tree sizes", columns, rows


def step_tables(record):
    columns = STEPS | peers.COLUMNS | LAUNCHES
    yield f"Steps of {record['model']} with random weights", columns, record["steps"]


def exact_tables(record):
    title = f"Verifying with {record['model']}, what bits that never differ cost"
    yield title, EXACT, record["verify"]


def heads_tables(record):
    yield f"Head accuracy, {record['model']}", *accuracy_table(record["accuracy"])
    rows, first = record["decoding"], next(iter(record["accuracy"]))
    if len({row["batch_size"] for row in rows}) == 1:
        yield f"Decoding {record['model']}", decoding_columns(first), rows
        return
    for name, temperature in dict.fromkeys((row["heads"], row["temperature"]) for row in rows):
        mine = [row for row in rows if (row["heads"], row["temperature"]) == (name, temperature)]
        title = f"{name} over batch sizes, temperature {temperature:g}"
        yield title, *grid(mine, {"speed_up": "plain"} if name == first else
                           {"speed_up": "plain", "speed_up_over_first": first})


def grid(rows, figures):
    """Rows of one kind of heads -> (columns, rows): a line for each batch size, a column for each
    tree size. figures: {figure: over what}."""
    columns, lines = {"batch size": "batch_size {}"}, {}
    for figure, over in figures.items():
        for row in rows:
            key, size = f"{figure} {row['tree_size']}", row["batch_size"]
            columns[f"over {over}, T = {row['tree_size']}"] = f"{key} {{:.2f}}x"
            lines.setdefault(size, dict(batch_size=size))[key] = row[figure]
    return columns, list(lines.values())


def kernel_tables(record):
    for name, operation in OPERATIONS.items():
        title = f"{name}, us; {record['copy_gb_per_s']:.0f} GB/s copied"
        yield title, operation.columns, record.get(name, [])


def static_tables(record):
    yield ("Registers per thread / spilled bytes / bytes of shared memory", static.COLUMNS,
           [row | static.figures(row) for row in record["table"]])


def test_tables(record):
    rows = record["tests"]
    counts = Counter(row["outcome"] for row in rows)
    yield (f"pytest -m gpu, {sum(row['seconds'] for row in rows):.0f} seconds",
           {"outcome": "outcome {}", "tests": "tests {}"},
           [dict(outcome=name, tests=count) for name, count in counts.items()])
    last = lambda row: row.get("error", "-").strip().splitlines()[-1][:100].replace("|", "/")
    bad = [row | dict(error=last(row)) for row in rows
           if row["outcome"] not in ("passed", "skipped")]
    columns = {"test": "test {}", "outcome": "outcome {}", "error": "error {}"}
    yield "Tests that did not pass", columns, bad


FORMS = {"decode": decode_tables, "decode-random": step_tables, "exact": exact_tables,
         "heads": heads_tables, "kernels": kernel_tables, "kernels-static": static_tables,
         "tests": test_tables}


# -------------------------------------------------------------------------------------------------
# As Markdown

def markdown(title, columns, rows):
    """The lines of one table; none without rows."""
    cells = {heading: [cell(row, column) for row in rows] for heading, column in columns.items()}
    cells = {heading: column for heading, column in cells.items() if set(column) - {"-"}}
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
    machine, found = record["machine"], []
    on = [machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"]
    on += [f"{name} {machine[name]}" for name in ("torch", "triton", "commit") if machine.get(name)]
    on = [record["dtype"].removeprefix("torch."), *on] if "dtype" in record else on
    for title, columns, rows in FORMS[record["bench"]](record):
        found += markdown(", ".join([title, *on]), columns, rows)
    return found


def report(path):
    """The lines of one file, with what is wrong with it."""
    try:
        record = read_json(path)
        if not {record.get("bench"), "error"} & {*FORMS, *record}:
            raise InputError(f"{path}: left out; expected a record of bench {', '.join(FORMS)}")
        found = lines(record) if record.get("bench") in FORMS else []
        if "error" in record:
            code, tail = record["error"]["exit_code"], record["error"]["tail"]
            found += [f"{path}: failed, exit code {code}: {(tail or ['no output'])[-1]}", ""]
        elif not record.get("complete", True):
            found += [f"{path}: not complete; the command that made it goes on with it", ""]
        return found
    except InputError as error:
        return [str(error), ""]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        kind = type(error).__name__
        return [f"{path}: left out; not what bench writes ({kind}: {error})", ""]


def bench(args):
    """`python -m bench report`: prints all tables."""
    paths = sorted(Path(args.folder).glob("*.json"))
    if not paths:
        raise InputError(f"{args.folder}: expected a folder with .json files, as python -m bench "
                         "--out writes them")
    for path in paths:
        print("\n".join(report(path)))
