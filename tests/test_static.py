"""tests/static.py: what every kernel passes without a GPU, and how many launches a step takes. `pytest` compiles a
sample, `pytest -m static` every launch."""

import re

import pytest
import torch

import kernels
import static
from clover import CloverHeads
from generate import DraftPlan, Sampling
from model import GPT
from static import Launches, step_launches
from tools.flags import DEMO

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT4 = dict(kind="int4", C=4096, N=4096, words=512, present="zeros")
INT8 = dict(kind="int8", C=4096, N=4096, words=1024, G=1)
TOP_P = Sampling(temperature=0.8, top_p=0.9)
pytestmark = pytest.mark.skipif(not kernels.HAS_TRITON or kernels.INTERPRETED.value,
                                reason="needs triton, and not its interpreter")


def check_figures(pairs, figures):
    """Of (target, launch) pairs: no spills on NVIDIA, and no more shared memory than the small GPUs of a generation."""
    wrong = []
    for (target, launch), used in zip(pairs, figures):
        assert (8 if target.startswith("cuda") else 1) <= used["registers"] <= 512  # fewer: a trap, and no kernel
        if used["shared"] > static.shared_limit(target, launch) or target.startswith("cuda") and used["spilled"]:
            wrong.append((target, *static.shape_class(launch), used))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.fixture(scope="module")
def sample():
    """A launch of every kernel."""
    calls = dict(
        tree_attention=dict(T=16, D=128), project_topk=dict(M=8, k=8), commit_path=dict(P=5, D=80, count=torch.int32),
        linear_quantized=INT4 | dict(M=8, G=32),
        add_norm=dict(C=4096, present="delta weight"), rope_cache=dict(D=128, present="rope q_weight k_weight"),
        glu=dict(C=22016), cosine_mix=dict(C=1024, n_head=8), ngram_lookup=dict(n=10), merge_chain=dict(T=16, n=10),
        select_candidates=dict(w=4, W=4, n=15, K=4, depth=3), best_tree=dict(n=15, K=4, tree_size=16),
        accept_path=dict(T=16, max_path=5), sum_parts=dict(N=8, C=4096, n=65536, present="bias"),
        filtered_sample=dict(temperature=0.8, top_k=0, top_p=0.9, min_p=0.0, seed=0))
    gathered = dict(M=32, temperature=0.8, seed=0, present="vocab_ids")
    return [*static.launches_of("tree_attention", T=2, D=64, present="slopes")[:1],
            *static.launches_of("tree_attention", T=2, D=64, window=1024),
            *static.launches_of("project_sample", **gathered)[:1],
            *(launch for name, given in calls.items() for launch in static.launches_of(name, **given))]


def bfloat16_twin(launch):
    """The bfloat16 launch that differs from a float16 launch in nothing else, else None. On every target all 45 twins
    have equal spills and shared memory, on NVIDIA equal registers too. So float16 is compiled for one target."""
    name, kinds, *rest = launch
    return (name, tuple(kind.replace("fp16", "bf16") for kind in kinds), *rest) if "*fp16" in kinds else None


def telling_pairs():
    """Every (target, launch) that can show something new. On AMD, where spills are no failure, a launch of each shape
    class shows whether it compiles and the shared memory, which was the same throughout every class."""
    launches = dict.fromkeys(static.all_launches())
    first = [launch for launch in launches if bfloat16_twin(launch) not in launches]
    of_class = {static.shape_class(launch): launch for launch in reversed(first)}
    return [(target, launch) for target in static.TARGETS for launch in (
        of_class.values() if target.startswith("hip") else launches if target == "cuda:90" else first)
        if target in static.targets_of(launch)]


@pytest.mark.static
def test_every_launch_compiles_without_spills_on_every_target():
    """Bug: a kernel that only the interpreter understands, that spills, or that needs too much shared memory."""
    pairs = telling_pairs()
    check_figures(pairs, static.compile_all(pairs))


def test_a_launch_of_every_kernel_compiles_without_spills(sample):
    """Bug: as above, in a sample of seconds."""
    launches = static.signatures(sample)
    names = {name for name in vars(kernels) if name.endswith("_kernel")}
    assert {launch[0] for launch in launches} == names
    assert set(launches) <= set(static.all_launches())
    pairs = [("cuda:90", launch) for launch in launches]
    check_figures(pairs, (static.usage(*pair) for pair in pairs))


def test_kernel_arguments_are_named_by_what_they_are(sample):
    """Bug: a pointer without _ptr, a stride or another number with it, a constant in small letters."""
    for name, _, args, named in sample:
        for i, parameter in enumerate(getattr(kernels, name).params):
            value = args[i] if i < len(args) else named[parameter.name]
            is_pointer = value is None or isinstance(value, torch.Tensor)
            assert is_pointer == parameter.name.endswith("_ptr"), (name, parameter.name)
            assert parameter.name.isupper() or not parameter.is_constexpr, (name, parameter.name)


def random_launches(generator):
    """Launches of shapes and dtypes drawn at random from all that the host functions take."""
    def draw(*choices):
        return choices[int(torch.randint(0, len(choices), (), generator=generator))]
    call = static.launches_of
    aligned, dtype, small = draw(True, True, False), draw(BF16, FP16, FP32), draw(BF16, FP32)
    launches = call(
        "tree_attention", dtype, aligned, "slopes" if draw(False, dtype != FP16) else "", T=draw(1, 2, 5, 17, 33, 64),
        window=0 if dtype == FP16 else draw(0, 0, 40, 1024), Hq=2 * draw(1, 2, 3, 8, 12),
        D=draw(16, 32, 48, 64, 80, 96, 128, 192, 256), S=draw(100, 4096, 50000))
    name, options = draw(
        ("project_sample", dict(temperature=0.8, seed=0)), ("project_sample", dict(temperature=0.0, seed=0)),
        *(("project_topk", dict(k=k)) for k in (1, 4, 32)))
    gathered = "vocab_ids" if draw(False, aligned) else ""
    launches += call(name, draw(BF16, FP32), aligned, gathered, draw(4, 24, 132, 304),
                     M=draw(1, 8, 17, 33, 64, 200), V=draw(32000, 151936), **options)
    launches += call("commit_path", draw(BF16, FP32), P=draw(1, 5, 17, 64), D=draw(16, 80, 256), count=torch.int32)
    launches += call("add_norm", small, present=draw("delta weight", "delta weight bias", ""),
                     C=draw(16, 1000, 4096, 9000))
    launches += call("rope_cache", small, present=draw("rope", "rope q_weight k_weight"), D=draw(16, 64, 80, 128, 160))
    launches += call("rope_cache", small, present=draw("", "q_weight k_weight"), D=21)
    launches += call("sum_parts", small, present=draw("", "bias"), N=draw(2, 8), C=4096, n=4096 * draw(1, 16))
    launches += call("glu", small, C=22016, activation=draw("silu", "gelu"))
    launches += call("filtered_sample", V=draw(100, 151936), temperature=0.8, top_k=draw(0, 50), top_p=0.9, min_p=0.0,
                     seed=0)
    launches += call("cosine_mix", small, C=draw(1024, 16384), n_head=draw(1, 8))
    T = draw(1, 16, 64)
    launches += call("accept_path", T=T, max_path=min(T, 5)) + call("ngram_lookup", n=draw(1, 10, 31, 63))
    T, n = draw((1, 10), (1, 63), (5, 4), (16, 31), (33, 31), (54, 10), (63, 1))
    launches += call("merge_chain", T=T, n=n)
    K, W, T = draw(1, 4, 32), draw(1, 3, 8), draw(16, 33, 64)
    n = min(W * W, T - 1)
    launches += call("select_candidates", w=W if K > 1 else 1, W=W, n=n, K=K, depth=K - 1)
    return launches + call("best_tree", n=n, K=K, tree_size=T)


def test_the_gate_knows_every_shape_class():
    """Bug: a host function chooses a tile, a number of warps or of stages that the gate never compiled."""
    def options(launch):
        return static.shape_class(launch), launch[-1]

    known, generator = {options(launch) for launch in static.all_launches()}, torch.Generator().manual_seed(0)
    for _ in range(60):
        assert {options(launch) for launch in static.signatures(random_launches(generator))} <= known


def test_figures_are_read_from_the_binary():
    """Bug: a spill that the gate cannot see: 96 registers are too few for a tile of 64 rows."""
    launch = static.launches_of("tree_attention", T=16, D=128)[0]
    signature = static.signature(launch[0], launch[2], launch[3] | dict(maxnreg=96))
    used = static.usage("cuda:90", signature)
    assert used["registers"] <= 96 and used["spilled"] > 100 and used["shared"] > 32 * 1024


@pytest.mark.parametrize("name, given, product", [
    pytest.param("tree_attention", dict(T=16, D=128), "HGMMA", id="attention-64-rows"),
    pytest.param("project_topk", dict(M=8, k=8), "HGMMA", id="project-8-rows"),
    pytest.param("project_topk", dict(M=8, k=8, weight=torch.int8, present="scales"), "HMMA", id="project-int8"),
    pytest.param("linear_quantized", INT4 | dict(M=8, G=32), "HGMMA", id="quantized-4-bits"),
    *(pytest.param(*case, id=name, marks=pytest.mark.static) for name, case in {  # `pytest` takes the others
        "attention-8-rows": ("tree_attention", dict(T=2, D=128), "HMMA"),
        "attention-128-rows": ("tree_attention", dict(T=16, Hq=16, D=128), "HGMMA"),
        "alibi-64-rows": ("tree_attention", dict(T=64, Hq=2, D=128, present="slopes"), "HGMMA"),
        "project-32-rows": ("project_topk", dict(M=32, k=8), "HMMA"),
        "project-64-rows": ("project_topk", dict(M=64, k=8), "HGMMA"),
        "project-128-rows": ("project_topk", dict(M=128, k=8), "HGMMA"),
        "quantized-64-rows": ("linear_quantized", INT4 | dict(M=64, G=32), "HGMMA"),
        "quantized-groups-of-32": ("linear_quantized", INT4 | dict(M=8, G=128), "HGMMA"),
        "quantized-8-bits": ("linear_quantized", INT8 | dict(M=64), "HGMMA"),
        "gathered-rows": ("project_topk", dict(M=8, k=8, present="vocab_ids"), "HGMMA")}.items())])
def test_hopper_loads_16_bytes_at_a_time(name, given, product):
    """Bug: the cache or the weights are not streamed by asynchronous copies of 16 bytes, or the tensor cores are
    idle; an accumulator is read while its product is in flight."""
    name, _, values, named = static.launches_of(name, **given)[0]
    compiled = static.compile_launch("cuda:90", static.signature(name, values, named))
    code = static.cuobjdump(compiled.asm["cubin"], "--dump-sass")
    assert len(re.findall(r"\bLDGSTS\.E\.BYPASS\.128\b", code)) >= 12 and re.search(rf"\b{product}\.", code)
    narrow = r"\bLDGSTS\.E\.(U8|U16)\b" if "quantized" in name else r"\b(LDG|LDGSTS)\.E(\.BYPASS)?\.(U8|U16|S16)\b"
    assert not re.search(narrow, code)  # each thread loads its rows' scales and zeros
    assert not static.early_reads(code)


def test_an_accumulator_that_is_read_too_early_is_seen():
    """Bug: a check that finds nothing."""
    code = [f"        /*{10 * i:04d}*/    {line} ;\n" for i, line in enumerate([
        "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR12], R24, gsb0", "FADD R3, R31, R2", "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "FADD R3, R24, R2"])]
    assert static.early_reads("".join(code)) == ["FADD R3, R31, R2 "]
    assert static.early_reads(code[0] + "".join(code[2:])) == []


def with_runtime_strides(launch):
    """The launch with every stride an int32 argument: none is known to be 1, 0 or a multiple of 16."""
    name, kinds, constants, multiples, options = launch
    strides = {i for i, parameter in enumerate(getattr(kernels, name).arg_names) if parameter.startswith("stride_")}
    kinds = tuple("i32" if i in strides else kind for i, kind in enumerate(kinds))
    return (name, kinds, tuple((i, value) for i, value in constants if i not in strides),
            tuple(i for i in multiples if i not in strides), options)


def products(ttir, arguments):
    """{argument: types of its products} of a kernel's Triton IR; an argument extended or broadcast is still itself."""
    same, found = {f"%{name}": name for name in arguments}, {name: [] for name in arguments}
    for result, operation, operands, kind in re.findall(r"(%\S+) = (\S+) (%[^:]*) : (.*?)(?: loc\(.*)?\n", ttir):
        for name in {same[operand] for operand in re.findall(r"%\w+", operands) if operand in same}:
            if operation in ("arith.extsi", "tt.splat", "tt.broadcast", "tt.expand_dims"):
                same[result] = name
            if operation == "arith.muli":
                found[name].append(kind)
    return found


@pytest.mark.parametrize("name, given", [
    ("tree_attention", dict(T=16, D=128)), ("project_topk", dict(M=8, k=8)),
    ("linear_quantized", INT4 | dict(M=8, G=32)),
    ("commit_path", dict(P=5, D=80, count=torch.int32)), ("rope_cache", dict(D=80, present="rope q_weight k_weight")),
    ("select_candidates", dict(w=4, W=4, n=15, K=4, depth=3)), ("best_tree", dict(n=15, K=4, tree_size=16))],
    ids=lambda x: x if isinstance(x, str) else "")
def test_addresses_have_64_bits(name, given):
    """Bug: an offset computed in 32 bits: from 2^31 elements on, 4 GB in bfloat16, a cache is read at random places."""
    for launch in map(with_runtime_strides, static.signatures(static.launches_of(name, **given))):
        strides = [name for name in getattr(kernels, launch[0]).arg_names if name.startswith(("stride_", "splits"))]
        found = products(static.compile_launch("cuda:90", launch).asm["ttir"], strides)  # splits: partial results
        for name, kinds in found.items():
            assert kinds and all(re.fullmatch("i64|tensor<.*xi64>", kind) for kind in kinds), (launch[0], name, kinds)


def test_commit_path_reads_all_rows_before_it_writes_any():
    """Bug: without a barrier one warp overwrites a row that another has yet to read."""
    launch, = static.signatures(static.launches_of("commit_path", P=64, D=256, count=torch.int32))
    assert dict(launch[-1])["num_warps"] > 1
    code = re.findall(r"\b(?:ld\.global|st\.global|bar\.sync)\b", static.compile_launch("cuda:90", launch).asm["ptx"])
    assert re.fullmatch("L+B+S+", "".join(dict(l="L", s="S", b="B")[operation[0]] for operation in code)), code


def test_static_table_keeps_the_worst_of_a_row(monkeypatch, capsys):
    """Bug: a spilling launch hidden behind a good one of the same tile, or a target's figures under another's name."""
    launch = static.all_launches()[0]
    assert static.shape_class(launch)[0] == "tree_attention"
    monkeypatch.setattr(static, "all_launches", lambda: [launch, launch])
    used = [dict(registers=n, spilled=8 * (n == 3), shared=100 - n) for n in range(8)]
    monkeypatch.setattr(static, "compile_all", lambda pairs: used)
    row, = static.table_of_figures()["table"]
    assert row["cuda:80"] == dict(launches=2, registers=4, spilled=0, shared=100)
    assert row["hip:gfx942"] == dict(launches=2, registers=7, spilled=8, shared=97)
    assert "| 4 / 0 / 100 |" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# The launches of a step

@pytest.fixture(scope="module")
def demo():
    """demo/ and its heads, without values."""
    model = GPT.from_pretrained(DEMO, device="cpu")
    heads = CloverHeads.from_pretrained(DEMO / "clover", model)
    return model.to("meta"), heads.to("meta")


@pytest.mark.parametrize("plan, sampling, most", [
    (DraftPlan(), Sampling(), 130), (DraftPlan(), Sampling(temperature=0.8), 130), (DraftPlan(), TOP_P, 138),
    (DraftPlan(0, 15), Sampling(), 135), (DraftPlan(15), Sampling(), 212), (DraftPlan(15), TOP_P, 220),
    (DraftPlan(63), Sampling(), 212), (DraftPlan(8, 7), Sampling(), 217)],
    ids=["plain", "plain-sampled", "plain-top-p", "lookup", "tree-of-16", "tree-of-16-top-p", "tree-of-64", "both"])
def test_a_step_takes_few_launches(demo, plan, sampling, most):
    """Bug: an operation that falls apart into several, in a step of the 12 layers of demo/; on a GPU each costs about 2
    us."""
    model, heads = demo
    found = step_launches(model, heads if plan.head_nodes else None, plans=(plan,), capacity=512, sampling=sampling)
    assert found.total() <= most, found
    heads, looked_up = plan.head_nodes > 0, plan.lookup_tokens > 0
    assert found["rope_cache"] == found["tree_attention"] == found["glu"] == 12 + heads
    assert found["project"] == found["merge_lists"] == (sampling != TOP_P) + found["select_candidates"]
    assert found["accept_path"] == 1 and found["best_tree"] == found["commit_path"] == heads
    assert found["ngram_lookup"] == found["merge_chain"] == looked_up


def test_what_it_takes_that_heads_read_in_every_step(demo):
    """Bug: drafting, or more than the augmenting block and its state, in a step in which lookup drafts alone."""
    alone, beside = (step_launches(demo[0], heads, plans=(DraftPlan(0, 4),), capacity=512) for heads in (None, demo[1]))
    assert beside["tree_attention"] == alone["tree_attention"] + 1 and beside["project"] == alone["project"]
    assert beside.total() <= alone.total() + 19, beside - alone


def test_the_table_has_the_counts(capsys):
    """Bug: a count under another tree size or drafter."""
    steps = static.table_of_launches((1, 2, 5))
    assert [(row["tree_size"], row["drafted_by"]) for row in steps] == [
        (1, "plain"), (2, "heads 1"), (5, "heads 4"), (5, "lookup 4"), (5, "heads 2 + lookup 2")]
    counts = [row["launches"] for row in steps]
    assert counts[0] < counts[3] < counts[1] < counts[2] and counts[3] < counts[4]
    assert all(sum(row["operations"].values()) == row["launches"] for row in steps)
    assert f"| 5 | lookup 4 | {counts[3]} | " in capsys.readouterr().out


def test_views_are_free_and_composites_count_what_they_are_made_of():
    """Bug: a count that misses what an operation calls, or takes a view for work."""
    x, norm = torch.zeros(4, 6, device="meta"), torch.nn.RMSNorm(6, device="meta")
    with torch.inference_mode(), Launches() as launches:
        x.view(6, 4).transpose(0, 1)[1:].unsqueeze(0)
        torch.empty(3, device="meta")
    assert launches.counts.total() == 0
    with torch.inference_mode(), Launches() as launches:
        norm(torch.nn.functional.linear(x, torch.zeros(6, 6, device="meta")))
    assert launches.counts["mm"] == 1 and launches.counts.total() > 3
