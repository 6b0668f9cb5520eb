"""--show-tree: what each step drafted, and what the model accepted of it."""

from collections import defaultdict, deque

from generate import TextStream

SHOWN = 4  # steps that drafted something


class Drafts:
    """Records the tree of every step of an engine that has no graph. `show` takes what its `on_step` gives."""

    def __init__(self, engine, session):
        self.engine, self.decode = engine, session.encoding.decode
        self.streams = [TextStream(session.encoding) for _ in session.texts]
        self.pending = defaultdict(deque)  # index of the prompt -> its trees that were drafted and not yet accepted
        self.steps = []                    # what `step` gives for each step
        self.draft, engine.draft = engine.draft, self.record

    def record(self, variant):
        """Takes the place of Engine.draft."""
        drafted, slots = self.draft(variant), self.engine.slots
        for index, active, tokens, parents, ancestors in zip(*(x.tolist() for x in (
                slots.sequence, slots.active, drafted[0].tokens, drafted[0].parents, drafted[0].ancestors))):
            if active:
                self.pending[index].append((tokens, parents, [node for node, seen in enumerate(ancestors) if seen]))
        return drafted

    def show(self, index, tokens, path, variant):
        self.steps.append(self.step(index, tokens, path, variant, *self.pending[index].popleft()))

    def step(self, index, tokens, path, variant, nodes, parents, used):
        """One step as a dict for --json. used: the nodes that are not spare. Nodes are numbered without the spare ones;
        the last emitted token is the model's own, unless the text ended before it."""
        number = {node: i for i, node in enumerate(used)}
        kind = lambda depth, node: "lookup" if node > variant.heads else f"head {depth}"
        guessed_by = [kind(depth, node) for depth, node in enumerate(path) if depth] + ["model"]
        return dict(prompt=index, variant=str(variant), guessed_by=guessed_by[:len(tokens)],
                    emitted=[self.streams[index].feed([token]) for token in tokens],
                    nodes=[self.decode([nodes[node]]) for node in used], path=[number[node] for node in path],
                    parents=[number.get(parents[node], -1) if node else -1 for node in used],
                    heads=sum(0 < node <= variant.heads for node in used))

    def lines(self):
        """The first trees as text."""
        trees = [(i, step) for i, step in enumerate(self.steps, start=1) if len(step["nodes"]) > 1]
        for i, step in trees[:SHOWN]:
            yield f"\nstep {i}, {step['variant']}; accepted guesses are marked"
            yield from branch(step, 0, "", "")
            if step["guessed_by"][-1:] == ["model"]:
                yield f"+ {step['emitted'][-1]!r:<{WIDTH}}  the model's own"
        if not trees:
            yield "\nno step drafted a tree; --draft heads --tree-size 9 does"


WIDTH = 40  # of a node with its branches


def branch(step, node, before, below):
    """The lines of a node and of those under it. before: what its own line begins with; below: what theirs do."""
    children = [child for child, parent in enumerate(step["parents"]) if parent == node and child]
    depth, up = 0, node
    while up:
        depth, up = depth + 1, step["parents"][up]
    by = "the newest token" if not node else "lookup" if node > step["heads"] else f"head {depth}"
    yield f"{'*' if node in step['path'][1:] else ' '} {before + repr(step['nodes'][node]):<{WIDTH}}  {by}"
    for child in children:
        last = child == children[-1]
        yield from branch(step, child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))
