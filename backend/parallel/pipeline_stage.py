"""One rank's stage of a transformer: the model's own forward with its blocks wrapped.

Every rank calls the same forward (PipeFusion, arXiv 2405.14430, in a generic form). Blocks of other stages
pass their input through, so shapes are known without handshakes. Tokens are cut once, at block 0, or in the
embedder before it. The first local block receives; the last one sends and ends the forward. Up to
Blocks.output_layer the model's own end sees this forward's tokens; without that the full sequence, of which
only these carry values.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import UnsupportedError
from ..models.common.shape_only import shape_only
from ..models.family import Family
from ..runtime.opaque_ops import RUNNING, text_count_tensor
from .attention.attention_hook import Attention, BlockCall
from .attention.early_values import watch_values
from .attention.kv_buffers import KVBuffers
from .block_streams import BlockStructure, Forward, Streams, block_list, blocks_of, token_shards
from .comm import Pipe, cat_or_same
from .local_embedding import embed_local_tokens
from .mesh import Mesh
from .sequence import SequenceLengths, Span, TokenShards
from .staged_block import StagedBlock
from .static_addresses import ENABLED, StaticInputs
from .step_context import StepContext
from .wire_bytes import FULL


def model_output(transformer: nn.Module, arguments: dict) -> Tensor:
    """Return a transformer's output (diffusers' classes: a tuple or a tensor)."""
    output = transformer(**arguments, return_dict=False)
    return output if isinstance(output, Tensor) else output[0]


class StageDone(Exception):
    """Ends a forward whose activation is on its way to the next stage, or of which no more was wanted."""


class Stage:
    """Wraps ``transformer``'s blocks for this rank's place on the mesh; those outside ``blocks``, which may
    be meta tensors, never run."""

    def __init__(self, transformer: nn.Module, family: Family, mesh: Mesh, blocks: range):
        self.family = family
        self.adapter = family.blocks.adapter
        self.blocks = blocks
        self.transformer = transformer
        self.join(mesh)
        self.current: Forward | None = None
        self.sequences: dict[str, SequenceLengths] = {}
        self.text_seen: set[tuple[str, int]] = set()  # prompt, sample whose text has run (Cache.static_text)
        self.launched_kinds: set[tuple] = set()  # kinds of forwards that have run in this request
        # prompt -> an activation that came: prompts may differ in width (control videos of Wan VACE)
        self.received_like: dict[str, Tensor] = {}
        self.cuts = WeakTensorKeyDictionary()
        self.static = StaticInputs() if ENABLED else None
        self.structure = BlockStructure.of(transformer, family)
        index = 0
        for name in family.blocks.lists:
            modules = block_list(transformer, name)
            for i, block in enumerate(modules):
                modules[i] = StagedBlock(self.run_block, index, block, index in blocks)
                index += 1
        self.receives_whole = True
        #: Whether references enter before the text does.
        self.references_first = False
        self.hooks = []
        for block in self.own_blocks:  # ``join`` makes another Attention: each call asks for that of now
            self.hooks += watch_values(block, family.blocks, lambda: self.attention)
        if mesh.pp.is_first:
            cache = family.cache
            self.hooks += embed_local_tokens(
                transformer, cache.token_modules, self._embedded, cache.token_latents
            )
        if family.blocks.output_layer:
            output_layer = transformer.get_submodule(family.blocks.output_layer)
            self.hooks.append(output_layer.register_forward_hook(self._fill))

    def join(self, mesh: Mesh):
        """Communicate over the groups of ``mesh``, on which this rank's place in the pipeline is the same."""
        self.mesh = mesh
        config: Any = self.transformer.config  # of diffusers
        blocks = self.family.blocks
        self.attention = Attention(mesh, blocks.head_size(config) if blocks.values else 0)
        self.pipe = None
        if mesh.pp.size > 1:
            self.pipe = Pipe(mesh.edges.before, mesh.edges.after, "pipeline", keeps_buffers=True)

    @property
    def own_blocks(self) -> list[nn.Module]:
        found = blocks_of(self.transformer, self.family)
        return [each.block for each in found if isinstance(each, StagedBlock) and each.block is not None]

    def leave(self):
        """Give the transformer its own blocks back, all of which are here."""
        for name in self.family.blocks.lists:
            modules = block_list(self.transformer, name)
            for i, wrapped in enumerate(modules):
                assert isinstance(wrapped, StagedBlock) and wrapped.block is not None, "all blocks are here"
                modules[i] = wrapped.block
        for hook in self.hooks:
            hook.remove()

    def _embedded(self, tokens: int, latent: str) -> tuple[Span, ...]:
        """Return which of the ``tokens`` of an embedder of ``latent`` a forward needs here; () for all."""
        if self.current is None:
            return ()
        with_text = self._with_text(self.current.context)
        sp = self.mesh.sp
        return self.current.embedded(tokens, latent, with_text, sp.rank, sp.size, sp.shares)

    def _fill(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Fill what the last layer made of this forward's tokens up to those of the latent."""
        if self.current is None or self.current.tokens.is_whole:
            return output
        return self.current.whole_output(output)

    def begin_request(self, kernel: str, buffers: KVBuffers | None, wire: str = FULL, compiled: bool = False):
        """Forget the request before. ``buffers``: of stale keys and values. ``compiled``: blocks run so."""
        self.end_request()
        self.attention.begin_request(kernel, buffers, wire, compiled)
        self.sequences.clear()
        self.text_seen.clear()
        self.launched_kinds.clear()
        self.static = StaticInputs() if ENABLED else None

    def end_request(self):
        """Free what would outlive the request: keys, values, and what came from the stage before."""
        self.attention.begin_request(self.attention.kernel, None)
        self.received_like.clear()
        self.cuts.clear()
        if self.pipe:
            self.pipe.forget_buffers()

    def drain(self):
        """Receive what other stages still send this one, and wait until they have what it sent."""
        if self.pipe:
            self.pipe.drain()

    def expect(self, context: StepContext) -> bool:
        """Post the receive of a forward; return False, also for all after it, if that is too early. Its size
        has to be known. A forward of its kind has to have run: a kernel's first launch may wait for the whole
        device, receives included, while their sender waits likewise for this stage."""
        known = context.prompt in self.received_like and context.prompt in self.sequences
        if not known or self._kind(context) not in self.launched_kinds:
            return False
        self._post(context, self.received_like[context.prompt])
        return True

    def _kind(self, context: StepContext) -> tuple:
        tokens = self._tokens(context)
        return context.prompt, len(context.sample_span), len(tokens.text), len(tokens.image)

    def _post(self, context: StepContext, like: Tensor):
        """Post the receive of a forward; ``like`` is an activation (b, tokens, D) of this request."""
        if self.pipe and not self.mesh.pp.is_first:
            tokens = self._tokens(context)
            width = like.shape[2] * (1 + len(self.structure.crossing(self.blocks.start)))
            shape = (len(context.sample_span), sum(self._received(tokens)), width)
            is_whole = context.image is None
            if is_whole != self.receives_whole:  # warm-up and steady state: the others would wait for nothing
                self.receives_whole = is_whole
                self.pipe.forget_buffers()
            self.pipe.post(shape, like.dtype, like.device, self.mesh.pp.neighbour(-1))

    def forward(
        self,
        arguments: dict,
        context: StepContext,
        latent: int = 0,
        reference: int = 0,
        latents: tuple[tuple[str, int], ...] = (),
    ) -> Tensor | None:
        """Return the transformer's output with the tokens of ``context`` filled (others are undefined), or
        None on all but the last stage. ``latent``, ``reference``: how many tokens they have;
        ``latents``: those of nested ones by name."""
        per_block = self.adapter.per_block_text(arguments)
        positions = self.attention.positions
        self.current = Forward(
            *(self.structure, context, latent, reference, per_block),
            positions=positions,
            cuts=self.cuts,
            latents=latents,
        )
        try:
            return model_output(self.transformer, arguments)
        except StageDone:
            return None
        finally:
            self.current = None
            if self.family.cache.static_text:
                self.text_seen.update(context.keys)

    def local_image(self, context: StepContext) -> Span:
        """Return the latent tokens that a forward of ``context`` computed on this rank."""
        return self._tokens(context).local.image

    def _tokens(self, context: StepContext) -> TokenShards:
        sp = self.mesh.sp
        sequence = self.sequences[context.prompt]
        with_text = self._with_text(context)
        return token_shards(context.image, sequence, with_text, sp.rank, sp.size, sp.shares)

    def _with_text(self, context: StepContext) -> bool:
        return context.with_text and not self.text_seen.issuperset(context.keys)

    # ------ what the wrapped blocks do, in this order
    def run_block(self, index: int, block: nn.Module | None, names: list[str], args: tuple, kwargs: dict):
        """Run block ``index`` in its place; return what it returns. ``names``: its positional parameters."""
        forward = self.current
        assert forward is not None, "blocks run within Stage.forward"
        structure = self.structure
        call = dict(zip(names, args)) | kwargs
        if block is None and structure.can_skip(index) and not forward.per_block_text:
            return self._pass(index, call)
        streams = forward.streams(index, call)
        if index in (0, structure.entry):
            streams = self._enter(forward, index, streams)
        if index == self.blocks.start and self.pipe and not self.mesh.pp.is_first:
            streams = self._receive(forward, self.pipe, streams)
        if block is not None:
            streams = self._run(forward, index, block, call, streams)
            if index in structure.skip_sources:
                forward.skips[index] = streams["image"]
        if forward.per_block_text:
            streams["text"] = streams["text"][:, : forward.tokens.carried_text]
        if index == self.blocks.stop - 1 and self.pipe and not self.mesh.pp.is_last:
            self._send(forward, self.pipe, streams)
            raise StageDone
        if index == structure.total - 1:
            self.adapter.leave(self.transformer, forward.tokens)
            streams = forward.leave(streams)
        elif index == structure.entry - 1:
            return self._before_text(forward, streams["image"])
        elif structure.joined[index] != structure.joined[index + 1]:
            streams["image"] = self.adapter.between_lists(streams["image"], forward.whole)
        return forward.result(index, call, streams)

    def _before_text(self, forward: Forward, image: Tensor) -> Tensor:
        """Return the image as the model joins text with it; a stage that is sent both needs the shape."""
        if self.blocks.start > self.structure.entry:
            return shape_only(image, forward.tokens.sequence.stream)
        return forward.whole(image)

    def _pass(self, index: int, call: dict):
        """Return what another stage's block returns."""
        blocks = self.family.blocks
        if self.structure.joined[index] or index < self.structure.entry:
            return call[blocks.image]
        return blocks.adapter.unchanged(blocks, call)

    def _enter(self, forward: Forward, index: int, streams: Streams) -> Streams:
        """Measure the sequence where streams enter, and cut them to this rank's tokens."""
        sequence = forward.sequence(index, streams)
        if index < self.structure.entry:
            self.references_first = sequence.reference > 0
        self.sequences[forward.context.prompt] = sequence
        forward.entered = self._tokens(forward.context)
        return forward.enter(streams)

    def _run(self, forward: Forward, index: int, block: nn.Module, call: dict, streams: Streams) -> Streams:
        family = self.family
        joined = self.structure.joined[index]
        dummy = family.blocks.needs_text_token and not joined and streams["text"].shape[1] == 0
        if dummy:
            text = streams["text"]
            streams = {**streams, "text": text.new_zeros(text.shape[0], 1, text.shape[2])}
        forward.put_streams(index, call, streams, dummy)
        mask = call.get(family.blocks.text_mask)
        if mask is not None:
            call[family.blocks.text_mask] = None  # attention applies it instead
        kinds = family.blocks.attention
        attention = BlockCall(
            index, forward.context, forward.tokens, kinds, dummy, family.cache.static_text, text_mask=mask
        )
        self.attention.call = attention
        RUNNING.text = text_count_tensor(len(forward.tokens.local.text))
        if self.static:
            names = tuple(filter(None, (family.blocks.image, family.blocks.text)))
            own = names if index > self.blocks.start else ()
            call = self.static.placed(index, call, own, forward.context)
        out = block(**call)
        self.attention.call = RUNNING.text = None
        self._check_calls(index, block, attention)
        assert attention.values is None and not attention.made, "values that are sent early are used"
        if joined:
            return self.structure.split(out, streams["text"].shape[1])
        if index < self.structure.entry:
            return {"text": None, "image": out}
        returned = self.adapter.returned(family.blocks, out)
        text = returned["text"]
        return {**returned, "text": text[:, :0]} if dummy and text is not None else returned

    def _check_calls(self, index: int, block: nn.Module, call: BlockCall):
        """Raise UnsupportedError where a block's attention did not come through the hook: its tokens would
        have attended to this rank's alone."""
        blocks = self.family.blocks
        count = blocks.count_attention_calls
        expected = count(block) if count else len(blocks.attention)
        if call.calls != expected:
            raise UnsupportedError(
                f"block {index} of {self.family.name} made {call.calls} attention calls through torch's "
                f"scaled_dot_product_attention, and its family says {expected}; something else computes its "
                f"attention, such as another attention backend or processor of diffusers: remove that."
            )

    def _receive(self, forward: Forward, pipe: Pipe, streams: Streams) -> Streams:
        text = streams["text"]
        image = streams["image"]
        if not pipe.posted:
            self._post(forward.context, image)
        crossing = self.structure.crossing(self.blocks.start)
        both, *skips = pipe.take().chunk(1 + len(crossing), dim=2)
        forward.skips = dict(zip(crossing, skips))
        self.received_like[forward.context.prompt] = both
        self.launched_kinds.add(self._kind(forward.context))
        if text is None:
            return {"image": both, "text": None}
        text_tokens, image_tokens = self._received(forward.tokens)
        reference = image[:, image_tokens:]
        image = both[:, text_tokens:]
        return {
            "text": torch.cat([both[:, :text_tokens], text[:, text_tokens:]], dim=1),
            "image": torch.cat([image, reference], dim=1) if reference.shape[1] else image,
        }

    def _received(self, tokens: TokenShards) -> tuple[int, int]:
        """Return (text tokens, tokens of the image stream) from the stage before: the latent's alone if text
        and references enter with this stage's first block, without text where only this does."""
        if self.blocks.start > self.structure.entry:
            return tokens.carried_text, tokens.local.stream
        return 0, tokens.local.stream if self.references_first else len(tokens.local.image)

    def _send(self, forward: Forward, pipe: Pipe, streams: Streams):
        text = streams["text"]
        image = streams["image"]
        both = image if text is None else torch.cat([text, image], dim=1)
        skips = [forward.skips[source] for source in self.structure.crossing(self.blocks.stop)]
        pipe.send(cat_or_same([both, *skips], dim=2), self.mesh.pp.neighbour(1))
