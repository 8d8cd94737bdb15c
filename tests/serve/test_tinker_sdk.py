"""The unmodified Tinker SDK trains and samples against the local server of its protocol."""

from __future__ import annotations

import gc
import json
import math
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("fastapi")
tinker = pytest.importorskip("tinker")

from nip_astra.serve.requests import ApiError  # noqa: E402
from nip_astra.serve.tinker import host  # noqa: E402
from nip_astra.serve.tinker.messages import read_forward_backward  # noqa: E402
from tests.kit.learning import Learning  # noqa: E402
from tests.kit.serving import wait_until  # noqa: E402
from tests.serve.running import POLICY, TrainingServer, training_server  # noqa: E402

PROMPT = [1, 10, 11, 12, 13]
ANSWER = [20, 21, 22, 2]
"""Tokens of the small model's."""


@pytest.fixture(scope="module")
def server() -> Iterator[TrainingServer]:
    with training_server(["tinker"], max_training_models=64) as running:
        yield running


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def client(server: TrainingServer) -> Iterator[Any]:
    with service_client(server) as client:
        yield client


def service_client(server: TrainingServer) -> Any:
    return tinker.ServiceClient(base_url=server.url, api_key="tml-any")


def training_client(client: Any, **options: Any) -> Any:
    given = {"rank": 4, "seed": 3, **options}
    return client.create_lora_training_client("policy", **given).result()


prompt_of = tinker.ModelInput.from_ints


def datum(**inputs: Any) -> Any:
    tokens = [*PROMPT, *ANSWER]
    given = {"target_tokens": torch.tensor(tokens[1:]), **inputs}
    return tinker.Datum(model_input=prompt_of(tokens[:-1]), loss_fn_inputs=given)


MASK = torch.tensor([0.0] * (len(PROMPT) - 1) + [1.0] * len(ANSWER))
ADAM = {"learning_rate": 1e-2}


def step(training: Any, *given: Any) -> float:
    """The loss of a forward and backward pass, by default of the answer, before a step."""
    passed = training.forward_backward(*(given or ([datum(weights=MASK)], "cross_entropy")))
    training.optim_step(tinker.AdamParams(**ADAM)).result()
    loss: float = passed.result().metrics["loss:sum"]
    return loss


def logprobs_of(training: Any) -> torch.Tensor:
    output = training.forward([datum(weights=MASK)], "cross_entropy").result()
    logprobs: torch.Tensor = output.loss_fn_outputs[0]["logprobs"].to_torch()
    return logprobs


def test_cross_entropy_learns_an_answer_and_the_sampler_generates_it(
    client: Any, learning: Learning
) -> None:
    training = training_client(client, seed=learning.seed)
    losses = [step(training) for _ in range(25)]
    learning.check(losses[-1] / losses[0], threshold=0.1, best=0.0)
    sampling = training.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=6, temperature=0.0)
    (sequence,) = sampling.sample(prompt_of(PROMPT), 1, params).result().sequences
    assert (list(sequence.tokens), sequence.stop_reason) == (ANSWER, "stop")
    assert sequence.logprobs == pytest.approx(logprobs_of(training)[-4:].tolist(), abs=1e-4)


def expected_loss(
    name: str, new: torch.Tensor, old: torch.Tensor, gains: torch.Tensor, high: float
) -> float:
    """Closed forms as the documentation of Tinker's losses writes them."""
    ratio = (new - old).exp()
    losses = {
        "importance_sampling": -ratio * gains,
        "ppo": -torch.minimum(ratio * gains, ratio.clamp(0.8, high) * gains),
        "cispo": -ratio.clamp(0.0, 4.0) * new * gains,
        "dro": -(new * gains - 0.5 * 0.05 * (new - old) ** 2),
    }
    return float(losses[name].sum())


@pytest.mark.parametrize(
    ("name", "config", "high"),
    [
        *((name, None, 1.2) for name in ("importance_sampling", "ppo", "cispo", "dro")),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}, 2.0),
    ],
)
def test_losses_of_policies_equal_their_closed_forms_and_raise_rewarded_tokens(
    client: Any, name: str, config: dict[str, float] | None, high: float
) -> None:
    training = training_client(client)
    before = logprobs_of(training)
    old, gains = before - 0.4 * MASK, 2.0 * MASK
    loss = step(training, [datum(logprobs=old, advantages=gains)], name, config)
    expected = expected_loss(name, before, old, gains, high)
    assert loss == pytest.approx(expected, rel=1e-5)
    moved = (logprobs_of(training) - before)[MASK > 0].sum()
    # Beyond the clip PPO has no gradient.
    is_clipped = name == "ppo" and config is None
    assert moved == pytest.approx(0.0, abs=1e-6) if is_clipped else moved > 0.1


def test_a_custom_loss_has_the_gradient_of_the_same_built_in_loss(client: Any) -> None:
    ours, theirs = training_client(client), training_client(client)
    result = ours.forward_backward_custom(
        [datum()], lambda _, logprobs: (-(logprobs[0] * MASK).sum(), {"extra": 7.0})
    ).result()
    ours.optim_step(tinker.AdamParams(**ADAM)).result()
    assert result.metrics["extra"] == 7.0
    assert result.metrics["loss:sum"] == pytest.approx(step(theirs), rel=1e-5)
    torch.testing.assert_close(logprobs_of(ours), logprobs_of(theirs))


def test_targets_may_differ_from_the_input_and_be_several_a_token(client: Any) -> None:
    training = training_client(client)
    plain = logprobs_of(training)
    targets = torch.tensor([*PROMPT[1:], *ANSWER])
    several = torch.stack([targets, (targets + 1) % 54], dim=1)
    data = [datum(target_tokens=several, weights=torch.ones(several.shape)), datum(weights=MASK)]
    output = training.forward_backward(data, "cross_entropy").result()
    both, alone = (one["logprobs"].to_torch() for one in output.loss_fn_outputs)
    torch.testing.assert_close(both[:, 0], plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(alone, plain, atol=1e-5, rtol=0)
    loss = -float(both.sum()) - float((alone * MASK).sum())
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    training.optim_step(tinker.AdamParams(**ADAM)).result()
    assert (logprobs_of(training) - plain).sum() > 0


def test_parameters_of_adam_are_those_of_each_step(client: Any) -> None:
    training = training_client(client)
    held = {"learning_rate": 1e-2, "grad_clip_norm": 1e-9, "eps": 1.0}
    for adam, atol in ((held, 1e-5), ({"learning_rate": 0.0}, 0.0)):
        before = logprobs_of(training)
        training.forward_backward([datum(weights=MASK)], "cross_entropy").result()
        figures = training.optim_step(tinker.AdamParams(**adam)).result().metrics
        assert figures["grad_norm:mean"] > 0
        torch.testing.assert_close(logprobs_of(training), before, atol=atol, rtol=0)


def test_a_state_goes_on_to_the_bit_with_its_optimizer(client: Any) -> None:
    training = training_client(client)
    step(training)
    path = training.save_state("middle").result().path
    expected = [step(training) for _ in range(3)]
    again = client.create_training_client_from_state_with_optimizer(path).result()
    assert [step(again) for _ in range(3)] == expected
    fresh = client.create_training_client_from_state(path).result()
    result = [step(fresh) for _ in range(3)]
    assert (result[0] == expected[0], result == expected) == (True, False)
    assert again.get_info().lora_rank == 4


def test_requests_are_done_in_the_order_in_which_they_were_sent(client: Any) -> None:
    training, slow = training_client(client), training_client(client)
    waited = [step(slow) for _ in range(6)]
    futures = []
    for _ in range(6):
        futures.append(training.forward_backward([datum(weights=MASK)], "cross_entropy"))
        training.optim_step(tinker.AdamParams(**ADAM))
    assert [one.result().metrics["loss:sum"] for one in futures] == waited


def test_several_clients_train_beside_each_other(server: TrainingServer, client: Any) -> None:
    alone = step(training_client(client))
    with service_client(server) as first, service_client(server) as second:
        trainings = [training_client(one) for one in (first, second)] * 2
        data = [datum(weights=MASK)]
        futures = [one.forward_backward(data, "cross_entropy") for one in trainings]
        assert {one.result().metrics["loss:sum"] for one in futures} == {alone}


def test_more_data_than_fit_in_one_request_are_one_loss(client: Any) -> None:
    training = training_client(client)
    one = training.forward([datum(weights=MASK)], "cross_entropy").result().metrics["loss:sum"]
    output = training.forward([datum(weights=MASK)] * 1030, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 1030
    assert output.metrics["loss:sum"] == pytest.approx(1030 * one, rel=1e-4)


def sampler(client: Any) -> Any:
    return client.create_sampling_client(base_model="policy").result()


def test_unnamed_weights_are_kept_while_they_are_used(
    server: TrainingServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "MAX_UNNAMED", 2)
    training = training_client(client)
    params = tinker.SamplingParams(max_tokens=1)
    used, unused = [training.save_weights_and_get_sampling_client().result() for _ in range(2)]
    for _ in range(3):
        used.sample(prompt_of(PROMPT), 1, params).result()
        step(training)
        last = training.save_weights_and_get_sampling_client().result()
    last.sample(prompt_of(PROMPT), 1, params).result()
    with pytest.raises(tinker.NotFoundError, match="sampler_lost"):
        unused.sample(prompt_of(PROMPT), 1, params).result()
    run = training.get_info().model_id.replace(":", "_")
    folder = Path(server.settings["state_dir"]) / "tinker" / run / "sampler_weights"
    assert len(list(folder.iterdir())) == 2


def test_many_prompts_are_sampled_together_as_each_alone(client: Any) -> None:
    sampling = sampler(client)
    params = [tinker.SamplingParams(max_tokens=8, seed=seed) for seed in range(12)]
    prompt = prompt_of(PROMPT)
    together = [sampling.sample(prompt, 3, one) for one in params]
    result = [[list(s.tokens) for s in one.result().sequences] for one in together]
    alone = [sampling.sample(prompt, 3, one).result().sequences for one in params]
    assert result == [[list(s.tokens) for s in one] for one in alone] != [result[0]] * 12


def test_logprobs_of_a_prompt_are_those_of_training(client: Any) -> None:
    sampling, training = sampler(client), training_client(client)
    tokens = prompt_of([*PROMPT, *ANSWER])
    result = sampling.compute_logprobs(tokens).result()
    assert result[0] is None
    assert result[1:] == pytest.approx(logprobs_of(training).tolist(), abs=1e-5)
    last = sampling.compute_logprobs(tokens, prompt_logprobs_last_n=2).result()
    assert last[:-2] == [None] * 7
    assert last[-2:] == pytest.approx(result[-2:])


def test_likeliest_named_and_other_tokens_of_a_prompt(client: Any) -> None:
    sampling = sampler(client)
    named = tinker.TensorData(data=[11, -1] * 4, dtype="int64", shape=[4, 2])
    result = sampling.sample(
        prompt_of(PROMPT),
        2,
        tinker.SamplingParams(max_tokens=3, seed=1, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=54,
        topk_sample_logprobs=2,
        target_prompt_logprobs=named,
        prompt_alt_tokens_k=5,
    ).result()
    likeliest = result.topk_prompt_logprobs_np
    for place in range(1, 5):
        ids, logprobs = likeliest.token_ids[place], likeliest.logprobs[place]
        by_token = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
        assert math.fsum(map(math.exp, by_token.values())) == pytest.approx(1, abs=1e-4)
        assert by_token[PROMPT[place]] == pytest.approx(result.prompt_logprobs[place], abs=1e-5)
        named_logprobs = result.target_prompt_logprobs.to_torch()[place - 1]
        assert named_logprobs.tolist() == pytest.approx([by_token[11], 0.0], abs=1e-5)
    assert result.prompt_alt_tokens.tokens.to_torch().shape == (4, 5)
    for one in result.sequences:
        assert len(one.tokens) == 3
        assert one.topk_logprobs_np.token_ids.shape == (3, 2)


def test_answers_end_at_stop_texts(client: Any) -> None:
    def answer(**options: Any) -> Any:
        return sample(client, max_tokens=12, seed=5, **options).result().sequences[0]

    free = answer(stop=[])
    assert (len(free.tokens), free.stop_reason) == (12, "length")
    third = int(free.tokens[2])
    place = list(free.tokens).index(third)
    assert list(answer(stop=[third]).tokens) == list(free.tokens)[: place + 1]
    # The SDK itself loads the tokenizer by the model's name, which is a folder here.
    tokenizer = client.create_sampling_client(base_model=str(POLICY)).result().get_tokenizer()
    text = tokenizer.decode(list(free.tokens)[:3])
    by_text = answer(stop=[text])
    assert (by_text.stop_reason, len(by_text.tokens) <= 3) == ("stop", True)


INFINITE = {"clip_low_threshold": math.inf}
POISONED: list[tuple[Any, str]] = [
    (lambda t: t.forward_backward([datum(weights=MASK)], "gspo"), "cross_entropy"),
    (lambda t: t.forward_backward([datum()], "ppo"), "advantages is missing; logprobs is missing"),
    (lambda t: t.forward_backward([datum(weights=MASK)], "cross_entropy", {"b": 1.0}), "config"),
    (lambda t: t.forward_backward([datum(advantages=MASK)], "cross_entropy"), "advantages"),
    (lambda t: t.forward_backward([datum(weights=MASK * math.nan)], "cross_entropy"), "finite"),
    (lambda t: t.forward_backward([datum(weights=MASK)], "ppo", INFINITE), "finite"),
    (lambda t: t.optim_step(tinker.AdamParams(learning_rate=1e30)), "1e\\+30"),
    (lambda t: t.save_state("../escape"), "invalid name"),
    (lambda t: t.save_weights_for_sampler("a b"), "invalid name"),
]


def test_poisoned_requests_are_reported_and_leave_the_model_unchanged(client: Any) -> None:
    training, other = training_client(client), training_client(client)
    for send, fact in POISONED:
        with pytest.raises(tinker.RequestFailedError, match=fact):
            send(training).result()
    assert step(training) == step(other)
    torch.testing.assert_close(logprobs_of(training), logprobs_of(other), rtol=0, atol=0)


def sample(client: Any, count: int = 1, **params: Any) -> Any:
    params = {"max_tokens": 1, **params}
    return sampler(client).sample(prompt_of(PROMPT), count, tinker.SamplingParams(**params))


STATE = "tinker://a:train:0"
MISSING: list[tuple[Any, str]] = [
    (lambda c: c.create_lora_training_client("nowhere"), "'nowhere'.*policy"),
    (lambda c: c.create_training_client_from_state(f"{STATE}/weights/b"), "no checkpoint"),
    (lambda c: c.create_sampling_client(f"{STATE}/sampler_weights/b"), "no checkpoint"),
]
DIMUON = tinker.types.DimuonOptimizerConfig()
INFLIGHT = {"kind": "inflight"}
REFUSED: list[tuple[Any, str]] = [
    (lambda c: sample(c, max_tokens=9999), "window"),
    (lambda c: sample(c, 30_000_000), "num_samples"),
    (lambda c: sample(c, temperature=3e7), "temperature"),
    (lambda c: sampler(c).compute_logprobs(prompt_of([999])), "0 to 53"),
    (lambda c: training_client(c).save_weights_and_get_sampling_client(**INFLIGHT), "kind"),
    (lambda c: training_client(c).save_state("a", ttl_seconds=10**15), "ttl"),
    (lambda c: c.create_lora_training_client("policy", optimizer=DIMUON), "adamw"),
]


def test_wrong_names_and_options_are_refused_at_once(client: Any) -> None:
    for error, table in ((tinker.NotFoundError, MISSING), (tinker.BadRequestError, REFUSED)):
        for send, fact in table:
            with pytest.raises(error, match=fact):
                send(client).result()


def test_a_prompt_of_other_parts_is_a_wrong_request(server: TrainingServer) -> None:
    # Without the SDK, which retries a request after a fault of the service for minutes.
    body = {"sampling_params": {}, "base_model": "policy"}
    for chunks in ([], [3], ["text"], [None], [{"type": "image"}]):
        sent = body | {"prompt": {"chunks": chunks}}
        reply = httpx.post(f"{server.url}/api/v1/asample", json=sent)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].startswith("prompt")


def send(server: TrainingServer, path: str, **body: Any) -> Any:
    """Send a request without the SDK; return the response."""
    return httpx.post(f"{server.url}/api/v1/{path}", json=body, timeout=60).json()


def test_a_session_that_ends_before_its_model_is_ready_takes_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build, may_build = host.build_model, threading.Event()

    def build_later(*given: Any, **options: Any) -> Any:
        assert may_build.wait(60)
        return build(*given, **options)

    def create() -> tuple[str, str]:
        session = send(server, "create_session")["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "policy"}
        return session, send(server, "create_model", **body)["request_id"]

    monkeypatch.setattr(host, "build_model", build_later)
    with training_server(["tinker"], max_training_models=1) as server:
        session, lost = create()
        httpx.post(f"{server.url}/api/v1/sessions/{session}/finish")
        may_build.set()
        assert session in send(server, "retrieve_future", request_id=lost)["error"]
        _, kept = create()
        assert send(server, "retrieve_future", request_id=kept)["type"] == "create_model"


def test_a_closed_model_is_freed(server: TrainingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    build, models = host.build_model, []

    def build_noted(*given: Any, **options: Any) -> Any:
        model = build(*given, **options)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(host, "build_model", build_noted)
    with service_client(server) as own:
        training = training_client(own)
        training.forward([datum(weights=MASK)], "cross_entropy").result()
        assert models[0]() is not None
    wait_until(lambda: gc.collect() >= 0 and models[0]() is None, 20)


def test_samples_of_a_session_need_a_number(server: TrainingServer) -> None:
    session = send(server, "create_session")["session_id"]
    sampling = send(server, "create_sampling_session", session_id=session, base_model="policy")
    body = {
        "sampling_session_id": sampling["sampling_session_id"],
        "prompt": {"chunks": [{"tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 1},
    }
    assert "needs seq_id" in send(server, "asample", **body)["error"]["message"]
    first, again, other = (
        send(server, "asample", **body, seq_id=n)["request_id"] for n in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("chunk", "shape"), [(5, [3]), (12, [2, 2]), (12, [-3]), (12, [10**6, 10**6])]
)
def test_bytes_that_are_no_tokens_are_refused(chunk: int, shape: list[int]) -> None:
    from tinker.proto import tinker_public_pb2 as pb

    request = pb.ForwardBackwardRequest(model_id="a", seq_id=1)
    added = request.data.add()
    added.model_input.add().encoded_text.tokens = bytes(chunk)
    targets = added.loss_fn_inputs["target_tokens"]
    targets.dtype, targets.dense = pb.DTYPE_INT64, bytes(24)
    targets.shape.extend(shape)
    with pytest.raises(ApiError) as caught:
        read_forward_backward(request.SerializeToString())
    assert caught.value.status == 400


def test_a_checkpoint_kept_for_too_long_breaks_no_list(client: Any, server: TrainingServer) -> None:
    path = training_client(client).save_state("kept", ttl_seconds=3600).result().path
    # As written by a service of an earlier version.
    (about,) = Path(server.settings["state_dir"]).rglob("kept/checkpoint.json")
    about.write_text(json.dumps({**json.loads(about.read_text()), "expires": 1e15}))
    assert httpx.get(f"{server.url}/api/v1/checkpoints").status_code == 200
    refused = httpx.get(f"{server.url}/api/v1/checkpoints", params={"limit": "9" * 5000})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")
    rest = client.create_rest_client()
    assert path in [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints]


def test_operations_before_their_turn_keep_no_other_client_waiting() -> None:
    with training_server(["tinker"], max_waiting=4) as server, service_client(server) as client:
        *early, other = (training_client(client) for _ in range(3))
        models = [one.get_info().model_id for one in early]

        def send(model: str, number: int) -> int:
            body = {"model_id": model, "seq_id": number, "adam_params": {}}
            return httpx.post(f"{server.url}/api/v1/optim_step", json=body).status_code

        for model in models:
            assert [send(model, number) for number in (2, 3, 4, 100)] == [200, 200, 200, 400]
        step(other)


def test_saved_states_are_listed_and_deleted(client: Any) -> None:
    training = training_client(client, user_metadata={"purpose": "listing"})
    state = training.save_state("one", ttl_seconds=3600, user_metadata={"step": "1"}).result().path
    sampled = training.save_weights_for_sampler("two").result().path
    rest = client.create_rest_client()
    run = rest.get_training_run_by_tinker_path(state).result()
    about = (run.base_model, run.lora_rank, run.user_metadata)
    assert about == ("policy", 4, {"purpose": "listing"})
    result = rest.list_checkpoints(run.training_run_id).result().checkpoints
    assert [one.tinker_path for one in result] == [state, sampled]
    assert (result[0].user_metadata, result[0].expires_at is None) == ({"step": "1"}, False)
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    rest.delete_checkpoint_from_tinker_path(sampled).result()
    (left,) = rest.list_checkpoints(run.training_run_id).result().checkpoints
    assert left.expires_at is None
    assert rest.list_user_checkpoints(limit=1).result().checkpoints
    assert client.get_server_capabilities().supported_models[0].model_name == "policy"
    with pytest.raises(tinker.BadRequestError, match="does not offer"):
        rest.publish_checkpoint_from_tinker_path(state).result()
