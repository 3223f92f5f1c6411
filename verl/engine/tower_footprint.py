"""Predict the bytes that a vision tower takes in a pass, from its shape alone.

The terms are those of transformers' modules with `torch.nn.functional` attention: norm, attention,
norm, MLP. They are counted for each patch of a picture; the tower runs once for each picture of a
micro-batch.
"""

from dataclasses import dataclass

from verl.engine.tower_shape import TowerShape


@dataclass(frozen=True, kw_only=True)
class TowerFootprint:
    """Bytes of one tower.

    Args:
        shape: the tower.
        itemsize: bytes of a number in passes.
        compiled: whether its layers are compiled, where `apply_compile` compiles towers.
        on_cuda: whether the device is a GPU.
        recomputing: layers that recompute their activations in the backward pass.
        most_inputs: most inputs of such layers on the device at once; None: all.
    """

    shape: TowerShape
    itemsize: int
    compiled: bool
    on_cuda: bool
    recomputing: int = 0
    most_inputs: int | None = None

    def forward(self, tokens: int) -> int:
        """Predict a pass without gradients: its pixels, one layer, and the features so far."""
        shape = self.shape
        width = self.itemsize
        # A layer's input, the states before and after its first norm.
        states = 3 if shape.rotary else 4
        if self._is_compiled:
            mlp_tensors = 2
        else:
            mlp_tensors = 3 if shape.gated or shape.two_step_activation else 2
        mlp = width * (states * shape.width + mlp_tensors * shape.intermediate)
        layer = max(mlp, self._attention())

        return self._whole(tokens, self._pixels() + layer) + self.features(tokens)

    def kept(self, tokens: int) -> int:
        """Predict the bytes that the backward pass needs: none of a frozen tower."""
        shape = self.shape
        if not shape.connector_trained:
            return 0
        of_token = 0 if shape.rotary else 2 * self.itemsize * shape.output
        of_patch = self._connector()
        if shape.trained:
            whole = shape.layers - self.recomputing
            inputs = self.recomputing
            if self.most_inputs is not None:
                inputs = min(inputs, self.most_inputs)
            of_patch += whole * self.layer_activations()
            of_patch += self.itemsize * (inputs * shape.width + shape.patch_numel)
            of_patch += self._positions()
        return self._whole(tokens, of_patch) + of_token * tokens

    def backward(self, tokens: int) -> int:
        """Predict what the backward pass of the last layer adds to `kept`.

        It holds the layer itself where it recomputes, and the gradients of its MLP and states.
        """
        recomputed = self.layer_activations() if self.recomputing == self.shape.layers else 0
        return self._whole(tokens, recomputed + self._moving())

    def first_layer(self, tokens: int) -> int:
        """Predict the backward pass of the first layer, when those of the others are gone."""
        shape = self.shape
        pixels = self.itemsize * shape.patch_numel
        layer = self.layer_activations() + self._moving()
        return self._whole(tokens, pixels + self._positions() + layer)

    def features(self, tokens: int) -> int:
        """Return the bytes of the features that the language model reads, DeepStack's included."""
        return self.itemsize * self.shape.features * tokens

    def deep_features(self, tokens: int) -> int:
        """Return the bytes of DeepStack's features, which exist until the last layer ends."""
        return self.itemsize * self.shape.deep * self.shape.output * tokens

    def layer_activations(self) -> int:
        """Return the bytes of a patch that autograd keeps in a layer that does not recompute.

        These are the residual before and after attention, the results of both norms, and the inputs
        of all matrix products and of attention. Rotated queries and keys are new tensors next to
        the joined queries, keys and values. On a CPU the results of windows are also joined.
        An RMS norm that is not compiled keeps its input in fp32 and its result before the weight.
        """
        shape = self.shape
        width = self.itemsize
        norms = 2 * self._norm()
        attention = 4 * shape.width
        if shape.rotary:
            attention += 2 * shape.width
            if not self.on_cuda:
                attention += shape.width
        if shape.norms_heads:
            norms += 2 * self._norm()

        if shape.gated:
            mlp_tensors = 3 if self._is_compiled else 4
        else:
            mlp_tensors = 3 if shape.two_step_activation and not self._is_compiled else 2
        scaled = 2 * shape.width if shape.scales else 0
        elements = attention + mlp_tensors * shape.intermediate + scaled
        return norms + width * elements + 4 * shape.heads

    # ---------------------------------------------------------------- terms

    @property
    def _is_compiled(self) -> bool:
        return self.compiled and self.shape.rotary

    def _whole(self, tokens: int, of_patch: int) -> int:
        return self.shape.patches(tokens) * of_patch

    def _moving(self) -> int:
        """Return the bytes of a patch of the gradients that a layer's backward pass holds."""
        return self.itemsize * (2 * self.shape.intermediate + 2 * self.shape.width)

    def _norm(self) -> int:
        """Return the bytes of a patch that a norm keeps: input and result, and its statistics."""
        shape = self.shape
        width = self.itemsize
        if shape.rms_norm and not self._is_compiled:
            return (4 + 2 * width) * shape.width + 4
        return 2 * width * shape.width + 8

    def _connector(self) -> int:
        """Return the bytes of a patch that the last norm and the connector keep.

        Qwen-VL's merger is an MLP as wide as the patches that it joins, and so are those of
        DeepStack, which share their input with the next layer. The others keep two states.
        """
        shape = self.shape
        states = self.itemsize * shape.width
        if not shape.rotary:
            return 2 * states
        return self._norm() + 2 * states + 3 * states * shape.deep

    def _positions(self) -> int:
        """Return the bytes of the tables of rotary positions, in fp32."""
        if not self.shape.rotary:
            return 0
        return 2 * 4 * self.shape.width // self.shape.heads

    def _pixels(self) -> int:
        """Return the bytes of a patch that the tower's call holds from its beginning to its end."""
        shape = self.shape
        copies = 4
        if self.itemsize < 4:
            copies += self.itemsize
        positions = 4 * shape.width if shape.interpolates else 0
        return copies * shape.patch_numel + positions + self._positions()

    def _attention(self) -> int:
        """Return the bytes of a patch at the widest moment of attention.

        It is the rotation of the keys, in fp32: queries and keys, the rotated queries, and the
        three tensors of the keys' own. Compiled, these are never there.
        """
        shape = self.shape
        width = self.itemsize
        if not shape.rotary:
            return 6 * width * shape.width
        if self._is_compiled:
            return 7 * width * shape.width
        rotation = 4 * 6 if width < 4 else 4 * 4
        return (5 * width + rotation) * shape.width
