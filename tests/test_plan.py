"""The GEMM plan: a pure function of the problem, checked without a GPU."""

import pytest

plan = pytest.importorskip("ampkernels._plan")

SHAPES = [
    (1, 14336, 4096),
    (16, 4096, 14336),
    (64, 4096, 14336),
    (512, 3072, 768),
    (4096, 4096, 4096),
    (3072, 768, 16384),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [16, 128, 512])
def test_a_split_under_a_policy_is_one_chunk(shape, chunk):
    p = plan.gemm_plan_dict(*shape, chunk=chunk, arch=80)
    assert p["split"] == 1 or p["split_len"] == chunk
    assert p["split"] * p["split_len"] >= shape[2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("aligned", [True, False])
def test_splits_cover_k_without_an_empty_one(shape, aligned):
    p = plan.gemm_plan_dict(*shape, arch=80, aligned=aligned)
    assert p["split_len"] % 16 == 0
    assert (p["split"] - 1) * p["split_len"] < shape[2] <= p["split"] * p["split_len"]


HOPPER_SHAPES = [(256, 4096, 14336), (768, 768, 8192), (1000, 520, 30001), (4096, 4096, 4096), (65, 64, 100)]


@pytest.mark.parametrize("epilogue", ["linear", "gated", "act_grad"])
@pytest.mark.parametrize("chunk", [0, 128, 512])
@pytest.mark.parametrize("shape", HOPPER_SHAPES)
def test_hopper_splits_k_into_ranges_of_whole_blocks_and_whole_chunks(shape, chunk, epilogue):
    p = plan.gemm_plan_dict(*shape, chunk=chunk, arch=90, epilogue=epilogue)
    assert p["kernel"] == "sm90"
    if p["split"] > 1:
        assert p["split_len"] % 64 == 0 if chunk == 0 else p["split_len"] == chunk
    assert (p["split"] - 1) * p["split_len"] < shape[2] <= p["split"] * p["split_len"]


def test_hopper_splits_k_where_the_tiles_do_not_fill_the_device():
    assert plan.gemm_plan_dict(768, 768, 8192, arch=90)["split"] > 1
    assert plan.gemm_plan_dict(256, 4096, 14336, arch=90)["split"] > 1
    assert plan.gemm_plan_dict(768, 768, 8192, chunk=512, arch=90)["split"] == 16
    # 44 tiles; but the fp32 sums of 28 chunks cost more to write than the idle SMs would save (docs/gemm.md).
    assert plan.gemm_plan_dict(256, 4096, 14336, chunk=512, arch=90)["split"] == 1
    for chunk in (0, 512):
        assert plan.gemm_plan_dict(8192, 8192, 8192, chunk=chunk, arch=90)["split"] == 1


def test_few_tiles_with_an_activation_are_not_ping_pong():
    # Two tiles an SM, one for each warpgroup: no products are left for the last epilogue to run under (docs/gemm.md).
    few = plan.gemm_plan_dict(4096, 1000, 1000, arch=90, activated=True)
    assert few["tile"][:2] == (128, 256) and few["split"] == 1
    many = plan.gemm_plan_dict(16384, 3072, 768, arch=90)
    assert many["tile"][1] < 256  # and ping-pong, where there are


def test_unaligned_operands_are_packed_where_the_products_pay_for_it():
    large = plan.gemm_plan_dict(4095, 4095, 4095, arch=80, aligned=False)
    assert large["pack_a"] and large["pack_b"] and large["aligned"]
    small = plan.gemm_plan_dict(1, 4095, 4095, arch=80, aligned=False)
    assert not (small["pack_a"] or small["pack_b"] or small["aligned"])


def test_hopper_has_a_kernel_for_more_than_64_rows_and_one_for_fewer():
    assert plan.gemm_plan_dict(4096, 4096, 4096, arch=90)["kernel"] == "sm90"
    assert plan.gemm_plan_dict(65, 4096, 4096, arch=90)["kernel"] == "sm90"
    for m in (1, 64):
        assert plan.gemm_plan_dict(m, 4096, 4096, arch=90)["kernel"] == "small"
        assert plan.gemm_plan_dict(m, 4096, 4096, arch=90, epilogue="gated")["kernel"] == "small"
        assert plan.gemm_plan_dict(m, 4096, 4096, arch=120)["kernel"] == "sm80"
        assert plan.gemm_plan_dict(m, 4096, 4096, arch=90, aligned=False)["kernel"] == "sm80"
        assert plan.gemm_plan_dict(m, 4096, 4096, arch=90, b_kmajor=False)["kernel"] == "sm80"
        assert plan.gemm_plan_dict(m, 4096, 4096, arch=90, chunk=48)["kernel"] == "sm80"
        assert plan.gemm_plan_dict(m, 4096, 4096, arch=90, dtype="fp16", acc="fp16")["kernel"] == "sm80"
    assert plan.gemm_plan_dict(4096, 4096, 4096, arch=120)["kernel"] == "sm80"
    assert plan.gemm_plan_dict(4096, 4096, 4096, chunk=48, arch=90)["kernel"] == "sm80"


SMALL_SHAPES = [(n, k) for n in (1, 40, 768, 1024, 4096, 6144, 14336) for k in (8, 768, 4096, 14336)]


@pytest.mark.parametrize("epilogue", ["linear", "gated"])
@pytest.mark.parametrize("chunk", [0, 64, 128, 512])
def test_few_rows_have_the_tree_of_one(chunk, epilogue):
    """The split of K depends on the weight alone; the ring fits, and has two stages or more."""
    for n, k in SMALL_SHAPES:
        plans = [plan.gemm_small_plan_dict(m, n, k, chunk=chunk, epilogue=epilogue) for m in range(1, 65)]
        assert len({(p["cluster"], p["split_len"]) for p in plans}) == 1
        for p in plans:
            rows_a, rows_b, tile_k = p["tile"]
            teams = 2 if p["warps"] == 14 else 1
            sources = p["cluster"] * teams
            pieces = sources * max(-(-rows_a // 16) // p["cluster"], 1) * rows_b * 64 if sources > 1 else 0
            assert p["warps"] == 5 * teams + 4 * (sources > 1) and (chunk > 0 or teams == 1)
            assert p["stages"] >= 2 * teams and p["stages"] % teams == 0
            assert 1024 + p["stages"] * (rows_a + rows_b) * tile_k * 2 + pieces <= 232448
            assert p["cluster"] * p["split_len"] >= k or chunk > 0
            assert chunk == 0 or p["split_len"] in (chunk, -(-k // 64) * 64)


def test_the_tiles_of_few_rows_are_one_wave():
    assert plan.gemm_plan_dict(16, 28672, 4096)["kernel"] == "sm80"
    assert plan.gemm_plan_dict(17, 28672, 4096)["kernel"] == "small"
    assert plan.gemm_plan_dict(16, 4096, 14336, chunk=512)["kernel"] == "small"
    assert plan.gemm_plan_dict(16, 4096, 14336, chunk=128)["kernel"] == "small"
    assert plan.gemm_small_plan_dict(16, 4096, 14336)["warps"] == 9  # one team and the adders of a cluster
    assert plan.gemm_small_plan_dict(16, 4096, 14336, chunk=512)["warps"] == 14  # two teams take chunks in turn
    assert plan.gemm_small_plan_dict(16, 4096, 14336, chunk=128)["warps"] == 9  # one, where they are short
    assert plan.gemm_small_plan_dict(16, 14336, 4096, chunk=512)["tile"][1] == 112  # 128 CTAs on 132 SMs
    for n, k in [(14336, 4096), (4096, 14336), (4096, 4096), (6144, 4096), (12288, 3072), (28672, 4096)]:
        p = plan.gemm_small_plan_dict(1, n, k)
        assert 0.7 * 132 <= -(-n // p["tile"][1]) * p["cluster"] <= 2 * 132


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        plan.gemm_plan(1, 1, 1, dtype="int8")
    with pytest.raises(ValueError, match="epilogue must be"):
        plan.gemm_plan(1, 1, 1, epilogue="softmax")


def test_the_kernels_divide_exactly():
    largest = 2**31 - 1
    for divisor in [*range(1, 300), 1000, 12345, *(2**s + d for s in range(9, 31) for d in (-1, 0, 1)), largest]:
        multiples = {k * divisor for k in (1, 2, 3, 1000, largest // divisor - 1, largest // divisor)}
        numerators = sorted({n + d for n in (0, largest, *multiples) for d in (-1, 0, 1) if 0 <= n + d <= largest})
        assert plan.quotients(numerators, divisor) == [n // divisor for n in numerators]
