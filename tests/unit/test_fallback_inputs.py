"""Arguments of classes without a family file that no step changes: made once a request."""

import pytest
import torch
from torch import Tensor

from backend.loading.autodetect.inputs import SIZES, Inputs
from backend.models.common.request_arguments import RequestArguments
from backend.models.latent_tokens import TokenGrid

GRID = TokenGrid((4, 6, 8), (1, 2, 2))
COND = {"c_crossattn": torch.ones(2, 5, 3), "guidance": torch.ones(1)}
#: Names of a class's parameters -> how its forward is filled.
KINDS = {
    "sizes": Inputs(("hidden_states", "timestep", *sorted(SIZES)), packed=False, video=False),
    "mask": Inputs(("hidden_states", "timestep", "encoder_attention_mask"), packed=False, video=False),
    "positions": Inputs(
        ("hidden_states", "timestep", "img_ids", "txt_ids"),
        *(True, False),
        numbers_text=True,
        image_last=True,
    ),
}


def filled(inputs: Inputs, cond: dict[str, Tensor], sigma: float) -> dict[str, Tensor]:
    latent = torch.full((2, 4, 6, 8), sigma)
    return inputs({}, GRID, latent, torch.tensor(sigma), cond)


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_step_changes_is_made_once_a_request(kind):
    """Sizes were copied from the host at every call of the model, which waits for the device."""
    inputs = KINDS[kind]
    cond = RequestArguments(COND, COND, slice(None), {})
    first, second = (filled(inputs, cond, sigma) for sigma in (0.75, 0.25))
    anew = filled(inputs, COND, 0.25)
    for name in inputs.names:
        is_of_step = name in ("hidden_states", "timestep")
        assert (first[name] is second[name]) != is_of_step, name
        assert torch.equal(second[name], anew[name]) and anew[name] is not second[name]
    assert not torch.equal(first["timestep"], second["timestep"])
    of_another = RequestArguments(COND, COND, slice(None), {})
    assert filled(inputs, of_another, 0.25)[inputs.names[-1]] is not second[inputs.names[-1]]


def test_sizes_are_in_pixels_of_the_whole_latent():
    sizes = filled(KINDS["sizes"], COND, 0.5)
    assert sizes["original_size"].tolist() == sizes["target_size"].tolist() == [[48, 64]] * 2
    assert sizes["crop_coords"].tolist() == [[0, 0]] * 2
