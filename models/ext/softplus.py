"""``SoftPlus``: a smooth ``max(x, 0)``, as an example of a model that is not part of NEML2."""

from __future__ import annotations

from neml2.factory import register_neml2_object
from neml2.models.model import Model
from neml2.schema import HitSchema, input, output, parameter
from neml2.types import Scalar, abs, exp, log


@register_neml2_object("SoftPlus")
class SoftPlus(Model):
    r"""``y = log(1 + exp(k x)) / k``, with the sharpness ``k`` in 1/[x]; the larger it is, the closer to the corner."""

    hit = HitSchema(
        input("from", Scalar, "The argument x", attr="_from"),
        output("to", Scalar, "The smoothed positive part of x", attr="_to"),
        parameter("sharpness", Scalar, "The sharpness k of the corner", attr="k"),
    )

    def forward(self, x, *promoted, v=None):
        k = self._get_param("k", promoted, Scalar)
        # log(1 + exp(z)) written so that neither a large positive nor a large negative z overflows
        z = k * x
        y = (0.5 * (z + abs(z)) + log(1.0 + exp(-abs(z)))) / k
        if v is None:
            return y
        slope = 1.0 / (1.0 + exp(-z))
        return y, self.apply_chain_rule(v, self._to, {self._from: lambda V: slope * V}, output=y)
