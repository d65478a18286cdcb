"""Transformers that no family file describes, and that cannot run: what is refused and why."""

import diffusers
import pytest
from fallback_models import CONFIGS, recognised, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.autodetect.inputs import inputs_of
from backend.loading.unsupported_models import FOLDER, UNSUPPORTED
from backend.parallel import mesh


def test_rows_that_cannot_be_cut_are_refused_and_cfg_is_not(tmp_path):
    name, says = "SanaVideoTransformer3DModel", "a"
    folder = str(write(tmp_path / name, name))
    for degree in ("ulysses_degree", "pipefusion_degree", "ring_degree"):
        with pytest.raises(
            UnsupportedError,
            match=f"{degree} is 2, but {name} runs with CFG and data parallelism only: it has no family "
            f"file, and {says}",
        ):
            Engine(ParallelConfig(**{degree: 2}), mesh.single()).check_load(folder, "default")
    Engine(ParallelConfig(cfg_degree=2), mesh.single()).check_load(folder, "default")


@pytest.mark.parametrize(
    "name, config, says",
    [
        (
            "DiTTransformer2DModel",
            dict(
                sample_size=16,
                num_layers=2,
                patch_size=2,
                attention_head_dim=8,
                num_attention_heads=2,
                in_channels=4,
                out_channels=8,
            ),
            "a trial of it failed",
        ),
        (
            "AllegroTransformer3DModel",
            dict(
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=4,
                out_channels=4,
                num_layers=2,
                cross_attention_dim=24,
                sample_width=16,
                sample_height=16,
                sample_frames=8,
                caption_channels=24,
            ),
            "its pipeline computes 'image_rotary_emb'",
        ),
        (
            "PRXTransformer2DModel",
            dict(
                patch_size=2,
                in_channels=4,
                context_in_dim=24,
                hidden_size=32,
                mlp_ratio=2.0,
                num_heads=2,
                depth=2,
                axes_dim=[8, 8],
            ),
            "nothing tells whether it counts to 1 or to 1000",
        ),
        (
            "BriaTransformer2DModel",
            dict(in_channels=16, num_layers=1, num_single_layers=1),
            "its pipeline computes 'img_ids'",
        ),
        ("OmniGenTransformer2DModel", {}, "its forward needs 'input_ids'"),
    ],
)
def test_classes_that_cannot_be_filled(name, config, says, monkeypatch):
    monkeypatch.setitem(CONFIGS, name, config)
    with pytest.raises(UnsupportedError, match=says):
        recognised(name)


def test_folder_of_something_else(tmp_path):
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    with pytest.raises(UnsupportedError, match="holds a AutoencoderKL, which is no transformer of diffusers"):
        Engine(ParallelConfig(), mesh.single()).check_load(str(tmp_path), "default")


#: Model that a refused file is of -> the diffusers class of its folder.
CLASSES = {
    "LongCat-Image": "LongCatImageTransformer2DModel",
    "Mochi": "MochiTransformer3DModel",
    "Ovis-Image": "OvisImageTransformer2DModel",
}


@pytest.mark.parametrize("name", sorted({known.name for known in UNSUPPORTED if known.remedy == FOLDER}))
def test_a_folder_that_a_refusal_names_is_not_refused(name):
    inputs_of(getattr(diffusers, CLASSES[name]), {})
