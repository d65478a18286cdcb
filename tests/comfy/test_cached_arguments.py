"""Arguments that ranks have cached for Parallel Model leave the GPU that they share with ComfyUI."""

import pytest
from comfy_modules import comfy_modules
from pairs import CONFIG, ksampler
from parallel_dit.backend.client import argument_cache, pool
from parallel_dit.backend.client.room import Room
from parallel_dit.backend.protocol import ModelCall, Release, Result

with comfy_modules():
    import comfy.samplers
    from comfy_extras import nodes_custom_sampler
    from parallel_dit.nodes.parallel_model import remote_model


class Sent(list):
    """Messages to the ranks."""

    @property
    def calls(self) -> list[ModelCall]:
        return [each for each in self if isinstance(each, ModelCall)]

    @property
    def forgotten(self) -> list[list[str]]:
        """The ids that each Release names."""
        return [each.forget for each in self if isinstance(each, Release)]


@pytest.fixture
def sent(flux, monkeypatch):
    """What goes to ranks of which one is on ComfyUI's GPU."""
    monkeypatch.setattr(argument_cache, "MIN_BYTES", 1)
    monkeypatch.setattr(Room, "shared_ranks", lambda room, welcome: [0])
    client, found = pool.backend_for(CONFIG).client, Sent()
    send = client.send
    monkeypatch.setattr(client, "send", lambda message: found.append(message) or send(message))
    return found


def test_they_leave_with_the_sampling(flux, sent):
    """The next sampling sends them again in its first call, without a call more."""
    run = ksampler(flux, steps=3, cfg=1.0)
    for _ in range(2):
        assert flux.error(run) <= 1e-4
    assert sent.forgotten == [[sent.calls[0].client], [sent.calls[3].client]]
    assert ["cond.c_crossattn" in each.tensors for each in sent.calls] == 2 * [True, False, False]


def test_they_leave_after_a_cancel(flux, sent, monkeypatch):
    """The client has begun with another id by then."""
    backend = pool.backend_for(CONFIG)
    sample = backend.sample

    def cancel(message, **rest):
        sample(message, **rest)  # else it ends with None: the ranks have computed and cached

    monkeypatch.setattr(backend, "sample", cancel)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        ksampler(flux, steps=3, cfg=1.0)(flux.ours)
    assert sent.forgotten == [[sent.calls[0].client]]


def test_what_ranks_were_too_busy_to_forget_is_named_again(flux, sent, monkeypatch):
    """They answer at once while another client's request runs; until then what they have is of use."""
    client = pool.backend_for(CONFIG).client
    request = client.request
    busy = [True]

    def answer(message, *rest):
        if isinstance(message, Release) and busy.pop():
            sent.append(message)
            return Result({"left": [], "freed": False})
        return request(message, *rest)

    monkeypatch.setattr(client, "request", answer)
    run = ksampler(flux, steps=2, cfg=1.0)
    run(flux.ours)
    busy.append(False)
    run(flux.ours)
    assert ["cond.c_crossattn" in each.tensors for each in sent.calls] == [True, False, False, False]
    assert sent.forgotten == 2 * [[sent.calls[0].client]]


@pytest.mark.skipif(
    not hasattr(nodes_custom_sampler, "Guider_DualModel"), reason="this ComfyUI has no DualModelGuider"
)
def test_those_of_a_guiders_second_model_leave_too(flux, sent):
    """They are under an id of their own."""
    guider = nodes_custom_sampler.Guider_DualModel(flux.ours, remote_model(flux.dit))
    guider.set_conds(flux.positive, flux.negative)
    guider.set_cfg(3.0)
    sigmas = comfy.samplers.calculate_sigmas(flux.ours.get_model_object("model_sampling"), "simple", 2)
    sampler = comfy.samplers.sampler_object("euler")
    guider.sample(flux.noise, flux.latent, sampler, sigmas, disable_pbar=True, seed=7)
    ids = {each.client for each in sent.calls}
    assert len(ids) == 2 and [set(each) for each in sent.forgotten] == [ids]
