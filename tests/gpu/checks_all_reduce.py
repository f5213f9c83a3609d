"""All-reduce of device memory against float64, and against the residuals' own books."""

import torch
import torch.distributed as dist
from checks import check, run
from gpu_world import (
    DEVICE,
    NODES,
    RANK,
    SIZE,
    SLOTS,
    added,
    assert_same_bits,
    cuda_communicator,
    gather,
    normal,
    of_my_node,
    reduce,
    shards,
)

import paceline
from paceline import _cuda
from paceline import communicator as core

SIZES = [1, 2, 3, 17, 255, 256, 1000, 4096, 4097, 65_536, 100_003, 1 << 20, 2_500_001, 12_000_000]
#: Relative rounding of one cast, and the least step near zero.
FORMATS = {"none": (2.0**-24, 0.0), "fp16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 0.0)}
CODECS = {"none": _cuda.CODEC_NONE, "fp16": _cuda.CODEC_FP16, "bf16": _cuda.CODEC_BF16}


def against_float64(made, count, codec, dtype=torch.float32, average=True, salt=0):
    data = normal(RANK, count, salt, dtype).to(DEVICE)
    reduce(made, data, codec=CODECS[codec], reduce_op=core.AVERAGE if average else core.SUM)
    torch.cuda.synchronize()
    parts = [normal(rank, count, salt, dtype).double() for rank in range(SIZE)]
    factor = SIZE if average else 1
    exact, magnitude = sum(parts) / factor, sum(p.abs() for p in parts) / factor
    rounding, least = FORMATS[codec]
    own = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    # Encoded once a rank and, over three or more nodes, once more as a sum; then rounded to the gradient's dtype.
    bound = (
        (2 * max(rounding, own) + own + 2.0**-23 * SIZE) * magnitude * 1.01
        + (SIZE + 1) * least
        + 2.0**-24 * (own > 2.0**-20)
    )
    error = (data.cpu().double() - exact).abs()
    worst = int((error - bound).argmax())
    assert (error <= bound).all(), (codec, dtype, count, worst, error[worst].item(), bound[worst].item())
    assert_same_bits(data, f"{codec} {dtype} {count}")


@check
def exact_sums_of_many_sizes():
    with cuda_communicator(reserve=max(SIZES) * 4) as made:
        for salt, count in enumerate(SIZES):
            against_float64(made, count, "none", salt=salt)
        against_float64(made, 4097, "none", average=False, salt=99)


@check
def fp16_and_bf16_of_many_sizes():
    with cuda_communicator(reserve=max(SIZES) * 4) as made:
        for salt, count in enumerate(SIZES):
            against_float64(made, count, "fp16", salt=salt)
            against_float64(made, count, "bf16", salt=salt + 50)


@check
def gradients_of_16_bits():
    with cuda_communicator(reserve=1 << 22) as made:
        for dtype in (torch.float16, torch.bfloat16):
            for count in (1, 7, 1000, 100_003):
                against_float64(made, count, "none", dtype, salt=count)


@check
def large_numbers_saturate_and_are_not_lost():
    with cuda_communicator(reserve=1 << 20) as made:
        data = torch.full((1000,), 3e38 if RANK == 0 else 1.0, device=DEVICE)
        reduce(made, data, codec=_cuda.CODEC_FP16)
        made.wait_arrival()
        assert torch.isfinite(data).all() and (data > 30_000).all(), data[:4]
        assert_same_bits(data)


@check
def inf_and_nan_reach_every_rank():
    with cuda_communicator(reserve=1 << 22) as made:
        for codec in (_cuda.CODEC_NONE, _cuda.CODEC_FP16, _cuda.CODEC_BF16, _cuda.CODEC_TOPK, _cuda.CODEC_INT8):
            for bad in (float("inf"), float("nan")):
                data = normal(RANK, 300_000).to(DEVICE)
                if RANK == SIZE - 1:
                    data[123_456] = bad
                segments = core.segment_array([(1, 0, data.numel())])
                reduce(made, data, codec=codec, ratio=0.01, segments=segments)
                finite = made.wait_arrival()
                assert not torch.isfinite(data).all(), (codec, bad)
                if codec in (_cuda.CODEC_TOPK, _cuda.CODEC_INT8):
                    assert not finite, (codec, bad)
                    made.rollback_residuals()
        data = normal(RANK, 300_000).to(DEVICE)
        reduce(made, data, codec=_cuda.CODEC_NONE)
        assert made.wait_arrival() and torch.isfinite(data).all()


@check
def many_operations_one_after_another_without_a_wait_between():
    with cuda_communicator(reserve=40 * 4 * 200_000) as made:
        for turn in range(10):
            data = [normal(RANK, 1 + 5000 * i, i + turn).to(DEVICE) for i in range(40)]
            for one in data:
                reduce(made, one, codec=_cuda.CODEC_NONE)
            made.wait_arrival()
            torch.cuda.synchronize()
            for i, one in enumerate(data):
                exact = sum(normal(r, 1 + 5000 * i, i + turn).double() for r in range(SIZE)) / SIZE
                assert (one.cpu().double() - exact).abs().max() < 1e-6, (turn, i)


def residual_of(made, key, count):
    data = torch.zeros(count)
    made.read_residual(key, data.data_ptr(), count)
    return data


def as_int8(v, block=512):
    """What int8 in blocks makes of v: whole steps of the block's largest magnitude over 127, in float32."""
    padded = torch.nn.functional.pad(v, (0, -v.numel() % block)).view(-1, block)
    scale = padded.abs().amax(1, keepdim=True) / 127
    return ((padded * (1 / scale)).round().clamp(-127, 127) * scale).view(-1)[: v.numel()]


def keeps_the_books(codec, ratio, settings, steps=6, count=1_000_003, keys=((7, 600_000), (8, 400_003))):
    """What was sent plus the new residual is the gradient plus the old one; the result is the sum of what was sent.

    The gradients of a node's ranks are added up first, and each of them keeps the residual of its shard. Of two ranks
    or nodes there is one order.
    """
    assert NODES == 2 and SLOTS <= 2
    with cuda_communicator(reserve=count * 4, **settings) as made:
        segments = core.segment_array([(key, 0, elements) for key, elements in keys])
        old = torch.zeros(count)
        for step in range(steps):
            gradients = [normal(rank, count, step) * 10.0 ** (step % 3 - 1) for rank in range(SIZE)]
            data = gradients[RANK].to(DEVICE)
            reduce(made, data, codec=codec, ratio=ratio, segments=segments)
            assert made.wait_arrival()
            made.commit_residuals()
            torch.cuda.synchronize()
            mine = torch.cat([residual_of(made, key, elements) for key, elements in keys])
            first, end = shards(count)[RANK % SLOTS]
            assert not mine[:first].any() and not mine[end:].any(), "a residual of what another rank owns"
            new = added(of_my_node(gather(mine)))
            # v as the codec starts from: rounded once (a fused multiply-add in float32).
            v = (added(of_my_node(gradients)).double() / SIZE + old.double()).float()
            sent = v - new  # exact in float32, by contract
            if codec == _cuda.CODEC_TOPK:
                nonzero = int((sent != 0).sum())
                assert nonzero <= ratio * count, (step, nonzero)
                assert nonzero >= 0.5 * ratio * count, (step, nonzero)
                best = v.abs().topk(int(ratio * count)).values.double().square().sum()
                got = sent.double().square().sum()
                assert got >= 0.8 * best, (step, (got / best).item())
            else:
                wanted = torch.cat([as_int8(v[first:end]) for first, end in shards(count)])
                assert torch.equal(sent, wanted), (step, (sent - wanted).abs().max().item())
            expected = added(gather(sent)[::SLOTS])
            assert torch.equal(data.cpu(), expected), (step, (data.cpu() - expected).abs().max().item())
            assert_same_bits(data)
            old = new


@check
def top_k_keeps_its_books_and_takes_the_largest():
    keeps_the_books(_cuda.CODEC_TOPK, 0.01, {"topk_threshold": 0})
    keeps_the_books(_cuda.CODEC_TOPK, 0.001, {"topk_threshold": 0, "topk_fp16": 1})


@check
def int8_keeps_its_books():
    keeps_the_books(_cuda.CODEC_INT8, 0.0, {})


@check
def a_rolled_back_step_leaves_no_trace():
    for codec in (_cuda.CODEC_TOPK, _cuda.CODEC_INT8):
        with cuda_communicator(reserve=1 << 22, topk_threshold=0) as made:
            segments = core.segment_array([(3, 0, 200_000)])
            for step in range(3):
                reduce(made, normal(RANK, 200_000, step).to(DEVICE), codec=codec, ratio=0.01, segments=segments)
                made.wait_arrival()
                made.commit_residuals()
            before = residual_of(made, 3, 200_000)
            reduce(made, normal(RANK, 200_000, 9).to(DEVICE), codec=codec, ratio=0.01, segments=segments)
            made.wait_arrival()
            made.rollback_residuals()
            assert torch.equal(residual_of(made, 3, 200_000), before)
            assert before.abs().sum() > 0
            made.scale_residuals(0.5)
            assert torch.equal(residual_of(made, 3, 200_000), before * 0.5)
            wished = normal(RANK, 200_000, 77)
            made.write_residual(3, wished.data_ptr(), wished.numel())
            assert torch.equal(residual_of(made, 3, 200_000), wished)


@check
def a_captured_stream_is_refused_by_name():
    """The capture itself is none the worse for it: it can be replayed, and the next all-reduce is right."""
    with cuda_communicator(reserve=1 << 20) as made:
        against_float64(made, 5000, "none")
        data = normal(RANK, 5000).to(DEVICE)
        kept, replays = data.clone(), torch.zeros(1, device=DEVICE)
        graph, said = torch.cuda.CUDAGraph(), ""
        with torch.cuda.graph(graph):
            replays += 1
            try:
                reduce(made, data, codec=_cuda.CODEC_NONE)
            except paceline.UnsupportedError as error:
                said = str(error)
        assert "all-reduce 'test': its stream is being captured into a CUDA graph" in said, said
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert replays.item() == 3 and torch.equal(data, kept), "something of the all-reduce was captured"
        against_float64(made, 5000, "none", salt=1)


@check
def bytes_on_the_wire_are_those_of_the_codec():
    count = 4_000_000
    dense = 2 * (NODES - 1) / NODES
    wanted = {_cuda.CODEC_NONE: 4 * dense, _cuda.CODEC_FP16: 2 * dense}
    if NODES == 2:
        wanted |= {_cuda.CODEC_INT8: 1 + 4 / 512, _cuda.CODEC_TOPK: 0.01 * 6}
    with cuda_communicator(reserve=count * 4, topk_threshold=0) as made:
        segments = core.segment_array([(3, 0, count)])
        for codec, bytes_each in wanted.items():
            before = made.stats()["wire_bytes"]
            reduce(made, normal(RANK, count).to(DEVICE), codec=codec, ratio=0.01, segments=segments)
            made.wait_arrival()
            dist.barrier()  # all have all: so this rank has sent all
            sent = (made.stats()["wire_bytes"] - before) * SLOTS
            assert 0.98 * bytes_each * count <= sent <= 1.04 * bytes_each * count, (codec, sent, bytes_each * count)


run()
