"""The optimizer's step of CUDA models, without a GPU: what is waited for, gated, kept, taken back, in which order."""

import weakref

import pytest
import torch
from fake_steps import FakeEndpoint, backward, optimizer_of
from torch import nn

import paceline
import paceline.torch
from paceline._torch import amp, cuda_steps
from paceline.errors import InvalidArgumentError, PeerLostError, UnsupportedError


def test_a_step_waits_for_arrival_first_and_keeps_the_residuals_after(endpoint):
    optimizer = optimizer_of(endpoint)
    for _ in range(2):
        backward(endpoint)
        assert endpoint.communicator.said() == []
        optimizer.step()
        assert endpoint.communicator.said() == ["wait", "commit"]
    optimizer.step()
    assert endpoint.communicator.said() == []


def test_any_optimizer_waits_but_only_the_models_own_ends_the_step(endpoint):
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    backward(endpoint)
    stranger.step()
    assert endpoint.communicator.said() == ["wait"]
    optimizer_of(endpoint).step()
    assert endpoint.communicator.said() == ["commit"]


#: What ends a path: GPUs that fail and NCCL are "unavailable".
FAULTS = [
    paceline.PeerLostError,
    paceline.UnavailableError,
    paceline.MismatchError,
    paceline.CorruptedError,
    paceline.ResourceExhaustedError,
    paceline.InternalError,
]


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_keeps_the_parameters(endpoint, kind):
    optimizer = optimizer_of(endpoint)
    backward(endpoint)
    endpoint.communicator.error = kind("rank 1 is at fault")
    for _ in range(2):  # a script may catch the first and go on
        with pytest.raises(kind, match="rank 1 is at fault"):
            optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3))


def test_what_no_rank_has_used_returns_once_its_pass_has_arrived(endpoint):
    optimizer = optimizer_of(endpoint)
    backward(endpoint)
    endpoint.steps.give_back("model", [7])
    assert endpoint.communicator.said() == []
    optimizer.step()
    assert endpoint.communicator.said() == ["wait", "rollback", "commit"]


def test_a_fault_is_told_before_anything_returns(endpoint):
    """A path that has failed takes nothing back, and would say so in the fault's place."""
    optimizer = optimizer_of(endpoint)
    backward(endpoint)
    endpoint.steps.give_back("model", [7])
    endpoint.communicator.error = PeerLostError("rank 1 is gone")
    for calls in (["wait"], []):
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            optimizer.step()
        assert endpoint.communicator.said() == calls


@pytest.mark.parametrize("kind", [paceline.InvalidArgumentError, paceline.UnsupportedError])
def test_a_refusal_is_no_fault(endpoint, kind):
    endpoint.steps.failed(kind("its stream is being captured"))
    optimizer = optimizer_of(endpoint)
    backward(endpoint)
    optimizer.step()
    assert endpoint.communicator.said() == ["wait", "commit"]


def test_a_host_that_hangs_in_torchs_nccl_is_let_go_and_told(watched, capsys):
    """It calls nothing of ours: the guard ends torch's NCCL, a look after it has heard."""
    endpoint, aborted = watched
    endpoint.steps.look()
    endpoint.communicator.communicator.error = PeerLostError("rank 1 (host b) is lost")
    endpoint.steps.look()
    assert not aborted, "the script's own thread comes first"
    for _ in range(3):
        endpoint.steps.look()
    assert aborted == [endpoint]
    assert capsys.readouterr().err == "paceline: on rank 0: rank 1 (host b) is lost\n"
    optimizer = optimizer_of(endpoint)
    with pytest.raises(PeerLostError, match="rank 1"):
        optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3))


def test_a_script_that_has_raised_the_error_is_told_nothing_more(watched, capsys):
    endpoint, aborted = watched
    endpoint.communicator.communicator.error = PeerLostError("rank 1 (host b) is lost")
    endpoint.steps.look()
    endpoint.steps.failed(PeerLostError("rank 1 (host b) is lost"))
    endpoint.steps.look()
    assert aborted == [endpoint]
    assert capsys.readouterr().err == ""


def test_what_is_closed_is_not_looked_at(watched):
    endpoint, aborted = watched
    endpoint.communicator.communicator.error = PeerLostError("rank 1 (host b) is lost")
    endpoint.communicator.closed = True
    for _ in range(3):
        endpoint.steps.look()
    assert not aborted


FUSED = [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {}), (torch.optim.AdamW, {})]


@pytest.mark.parametrize(("kind", "arguments"), FUSED)
def test_a_fused_optimizer_has_a_gate_instead_of_a_wait(endpoint, fused, kind, arguments):
    optimizer = optimizer_of(endpoint, kind, fused=True, **arguments)
    parameter = optimizer.param_groups[0]["params"][0]
    backward(endpoint)
    optimizer.step()
    assert endpoint.communicator.said() == ["gate", "rest"] and not hasattr(optimizer, "found_inf")
    stepped = parameter.detach().clone()
    assert not torch.equal(stepped, torch.ones(3))
    backward(endpoint)  # what the step waited for is settled now
    assert endpoint.communicator.said() == ["wait", "commit"]
    endpoint.communicator.word.value = 1.0  # a fault, before this step's gradients have arrived
    optimizer.step()
    assert torch.equal(parameter, stepped)
    endpoint.communicator.error = PeerLostError("rank 1 is gone")
    with pytest.raises(PeerLostError):
        backward(endpoint)


def test_a_gate_after_a_fault_raises(endpoint, fused):
    optimizer = optimizer_of(endpoint, fused=True)
    backward(endpoint)
    endpoint.communicator.error = PeerLostError("rank 1 is gone")
    with pytest.raises(PeerLostError):
        optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3))


def test_a_fault_while_the_host_sleeps_raises(endpoint, fused, monkeypatch):
    optimizer = optimizer_of(endpoint, fused=True)
    backward(endpoint)
    error = PeerLostError("rank 1 is gone")

    def rest():
        raise error

    endpoint.communicator.word.value = 1.0
    monkeypatch.setattr(endpoint.communicator, "rest", rest, raising=False)
    for _ in range(2):  # a script may catch the first and go on
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3))
    assert not hasattr(optimizer, "found_inf")


def test_what_a_gated_step_sent_is_taken_back_when_not_finite(endpoint, fused):
    optimizer = optimizer_of(endpoint, fused=True)
    backward(endpoint)
    optimizer.step()
    endpoint.communicator.finite = False
    endpoint.steps.arrive()
    assert endpoint.communicator.said() == ["gate", "rest", "wait", "rollback"]


def closure_of(endpoint):
    def closure():
        backward(endpoint)
        return torch.tensor(2.5)

    return closure


@pytest.mark.parametrize("named", [False, True])
def test_a_closure_sends_and_its_kernels_wait(endpoint, named):
    optimizer = optimizer_of(endpoint)
    parameter = optimizer.param_groups[0]["params"][0]
    closure = closure_of(endpoint)
    loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
    assert loss.item() == 2.5 and endpoint.communicator.said() == ["wait", "commit"]
    stepped = parameter.detach().clone()
    endpoint.communicator.error = PeerLostError("rank 1 is gone")
    with pytest.raises(PeerLostError):
        optimizer.step(closure)
    assert torch.equal(parameter, stepped)


def test_a_closure_that_is_called_often_waits_each_time(endpoint):
    optimizer = optimizer_of(endpoint, torch.optim.LBFGS, max_iter=3, tolerance_grad=0, tolerance_change=0)
    said = []

    def closure():
        said.append(endpoint.communicator.said())
        backward(endpoint)
        return torch.tensor(1.0)

    optimizer.step(closure)
    said.append(endpoint.communicator.said())
    assert len(said) > 2 and said[0] == [] and all(calls.count("wait") == 1 for calls in said[1:]), said
    assert said[-1][-2:] == ["wait", "commit"]


def test_a_closure_with_a_gate(endpoint, fused):
    optimizer = optimizer_of(endpoint, fused=True)
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.step(closure_of(endpoint))
    assert endpoint.communicator.said() == ["gate", "rest"] and not hasattr(optimizer, "found_inf")
    stepped = parameter.detach().clone()
    assert not torch.equal(stepped, torch.ones(3))
    endpoint.communicator.word.value = 1.0

    def closure():
        assert endpoint.communicator.said() == [], "the forward pass need not wait for the step before"
        return closure_of(endpoint)()

    optimizer.step(closure)
    assert endpoint.communicator.said() == ["wait", "commit", "gate", "rest"]
    assert torch.equal(parameter, stepped)
    (_, closure), _ = cuda_steps.before_optimizer_step(optimizer, (optimizer, closure_of(endpoint)), {})
    closure()
    assert endpoint.communicator.said() == ["wait", "commit", "gate"] and hasattr(optimizer, "found_inf")
    backward(endpoint)  # of the second call: what the gate was for arrives here
    assert endpoint.communicator.said() == ["wait", "commit"] and not hasattr(optimizer, "found_inf")
    endpoint.steps.arrive()


def test_who_else_waits(endpoint, fused):
    """Two optimizers of a step, a loss scale, an optimizer of the script's own kind, a second model under way."""
    first, second = (optimizer_of(endpoint, fused=True) for _ in range(2))
    backward(endpoint)
    first.step()
    second.step()
    assert endpoint.communicator.said() == ["gate", "rest", "wait", "commit"]
    first.found_inf = torch.zeros(())
    backward(endpoint)
    first.step()
    assert endpoint.communicator.said() == ["wait", "commit"]
    del first.found_inf

    class Own(torch.optim.SGD):
        pass

    backward(endpoint)
    optimizer_of(endpoint, Own, fused=True).step()
    assert endpoint.communicator.said() == ["wait", "commit"]
    other = FakeEndpoint()
    backward(endpoint)
    backward(other)
    second.step()
    assert endpoint.communicator.said() == ["wait", "commit"] and other.communicator.said() == ["wait"]
    other.steps.forget()


def test_without_an_optimizer_the_next_pass_waits(endpoint):
    backward(endpoint)
    assert endpoint.communicator.said() == []
    backward(endpoint)
    assert endpoint.communicator.said() == ["wait", "commit"]


def test_not_finite_takes_the_residuals_back(endpoint):
    optimizer = optimizer_of(endpoint)
    backward(endpoint)
    endpoint.communicator.finite = False
    optimizer.step()
    assert endpoint.communicator.said() == ["wait", "rollback"]


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="older torch has no GradScaler for the CPU")
@pytest.mark.parametrize("bad", [False, True])
def test_a_scaler_s_fused_step_is_settled_once_it_is_known_whether_its_kernels_changed_anything(endpoint, bad):
    """It steps in any case; no gate, and no wait but the one of every step."""
    optimizer = optimizer_of(endpoint, fused=True)
    parameter = optimizer.param_groups[0]["params"][0]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    backward(endpoint)
    if bad:
        parameter.grad[0] = float("inf")
    scaler.step(optimizer)
    assert endpoint.communicator.said() == ["wait", "rollback" if bad else "commit"]
    assert torch.equal(parameter.detach(), torch.ones(3)) == bad


def test_a_step_that_the_scaler_skips_takes_the_residuals_back(endpoint):
    """The scaler calls no optimizer then: arrival is waited for all the same."""
    backward(endpoint)
    for steps in amp.ResidualSteps.every():
        steps.optimizer_skipped(optimizer_of(endpoint))
    assert endpoint.communicator.said() == ["wait", "rollback"]
    backward(endpoint)
    endpoint.steps.scale(0.5, [*endpoint.steps.models.values()])
    assert endpoint.communicator.said() == ["wait", "commit", "scale"]


def test_a_refused_operation_is_not_waited_for(endpoint):
    endpoint.steps.submitted(True, "model")
    endpoint.steps.not_submitted("model")
    endpoint.steps.arrive()
    assert endpoint.communicator.said() == []


@pytest.fixture
def two(endpoint, monkeypatch):
    """An endpoint with a model of one bucket, key 7, and one of two, key 9; says what is asked with which keys."""
    steps, communicator = endpoint.steps, endpoint.communicator
    steps.models.clear()
    optimizers = {}
    for model, key in (("first", 7), ("second", 9)):
        parameter = nn.Parameter(torch.randn(3))
        parameter.grad = torch.randn(3)
        steps.add(model, [(key, parameter)])
        optimizers[model] = torch.optim.SGD([parameter], lr=0.1)
    communicator.operations = 0
    for name in ("commit", "rollback"):
        monkeypatch.setattr(
            communicator,
            f"{name}_residuals",
            lambda keys, name=name: communicator.calls.append((name, keys)),
            raising=False,
        )

    def run(model, buckets=1):
        for index in range(buckets):
            steps.submitted(index == 0, model)
            communicator.operations += 1
            steps.sent(model, communicator.operations)

    return endpoint, optimizers, run


def test_models_step_at_times_of_their_own(two):
    endpoint, optimizers, run = two
    run("first")
    run("second", 2)
    optimizers["first"].step()
    assert endpoint.communicator.said() == ["wait", ("commit", [7])]
    run("first")
    assert endpoint.communicator.said() == []
    optimizers["first"].step()
    assert endpoint.communicator.said() == ["wait", ("commit", [7])]
    optimizers["second"].step()
    assert endpoint.communicator.said() == [("commit", None)]


def test_the_model_that_is_not_finite_is_taken_back_alone(two):
    endpoint, optimizers, run = two
    run("first")
    run("second", 2)
    endpoint.communicator.finite, endpoint.communicator.not_finite = False, [3]
    optimizers["first"].step()
    assert endpoint.communicator.said() == ["wait", ("rollback", [9]), ("commit", None)]


def test_what_a_model_alone_was_told_is_not_told_again_beside_another(two):
    endpoint, optimizers, run = two
    second = endpoint.steps.models.pop("second")
    endpoint.communicator.finite, endpoint.communicator.not_finite = False, [1]
    run("first")
    optimizers["first"].step()
    assert endpoint.communicator.said() == ["wait", ("rollback", None)]
    assert endpoint.communicator.not_finite == ()
    endpoint.steps.models["second"] = second
    run("first")
    run("second")
    endpoint.communicator.not_finite = [3]
    optimizers["first"].step()
    assert endpoint.communicator.said() == ["wait", ("rollback", [9]), ("commit", None)]


def test_where_it_is_not_known_whose_numbers_are_not_finite_all_are_taken_back(two):
    endpoint, optimizers, run = two
    run("first")
    run("second")
    endpoint.communicator.finite = False
    optimizers["first"].step()
    assert endpoint.communicator.said() == ["wait", ("rollback", [7]), ("rollback", None)]


def test_a_wait_for_one_model_keeps_in_mind_what_it_has_heard_of_another(two):
    endpoint, optimizers, run = two
    run("first")
    run("second")
    endpoint.communicator.not_finite = [2]
    assert endpoint.steps.not_finite(False) == {"second"}  # as an overlapped model's wait for its own bucket is told
    optimizers["second"].step()
    assert endpoint.communicator.said() == ["wait", ("rollback", [9])]
    optimizers["first"].step()
    assert endpoint.communicator.said() == [("commit", None)]


def test_whose_turn_it_was_is_remembered_for_long_enough(two):
    endpoint, _, run = two
    for _ in range(2000):
        run("first")
        run("second")
    endpoint.communicator.not_finite = [3999]
    assert endpoint.steps.not_finite(False) == {"first"}
    endpoint.communicator.not_finite = [4000]
    assert endpoint.steps.not_finite(False) == {"second"}
    assert len(endpoint.steps._turns) <= cuda_steps._TURNS
    endpoint.communicator.not_finite = [1]
    assert endpoint.steps.not_finite(False) == {"first", "second"}


def test_a_skipped_step_of_one_model_is_taken_back_alone(two):
    endpoint, optimizers, run = two
    run("first")
    run("second")
    endpoint.steps.optimizer_skipped(optimizers["first"])
    optimizers["second"].step()
    assert endpoint.communicator.said() == ["wait", ("rollback", [7]), ("commit", None)]


def test_without_residuals_only_the_wait_is_left():
    endpoint = FakeEndpoint(enabled=False)
    backward(endpoint)
    optimizer_of(endpoint).step()
    assert endpoint.communicator.said() == ["wait"]
    endpoint.steps.forget()


def test_momentum_twice_is_refused():
    endpoint = FakeEndpoint(momentum=0.9)
    with pytest.raises(InvalidArgumentError, match=r"PACELINE_TOPK_MOMENTUM=0.9.*SGD.*momentum=0"):
        optimizer_of(endpoint, momentum=0.9).step()
    optimizer_of(endpoint).step()
    endpoint.steps.forget()


def test_momentum_of_adam_s_is_refused_too(endpoint):
    corrected = FakeEndpoint(momentum=0.9)
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        with pytest.raises(InvalidArgumentError, match=rf"{kind.__name__} applies 0.8 once more; train with SGD"):
            optimizer_of(corrected, kind, betas=(0.8, 0.9)).step()
    optimizer_of(corrected, torch.optim.Adam, betas=(0.0, 0.9)).step()
    optimizer_of(endpoint, torch.optim.Adam).step()  # nothing is corrected here
    overlapping = optimizer_of(corrected, momentum=0.9)
    overlapping._paceline_overlaps = True
    with pytest.raises(InvalidArgumentError, match=r"SGD applies 0\.9 once more"):
        overlapping.step()
    corrected.steps.forget()


def test_a_step_under_capture_is_refused(endpoint, monkeypatch):
    """A replay would run no hook: it would wait for nothing, and its gate would say what it said at capture."""
    optimizer = optimizer_of(endpoint)
    backward(endpoint)
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(UnsupportedError, match=r"SGD.step\(\) is being captured into a CUDA graph"):
            optimizer.step()
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()  # nobody's of ours
    assert torch.equal(optimizer.param_groups[0]["params"][0], before)
    optimizer.step()  # and goes on without one
    assert "wait" in endpoint.communicator.said()


def test_an_endpoint_that_is_gone_is_forgotten():
    endpoint = FakeEndpoint()
    steps = weakref.ref(endpoint.steps)
    del endpoint
    import gc

    gc.collect()
    assert steps() is None
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
