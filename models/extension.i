# A user extension: the type `SoftPlus` is not part of NEML2; it is defined in ext/softplus.py, which the manifest loads.
# The source of the extension is an input of the build: edit it, and this target is captured again, and no other.
# Here it smooths the corner of an overstress law, so that the flow rate has a derivative everywhere.
[Models]
  [overstress]
    type = ScalarLinearCombination
    from = 'stress threshold'
    to = 'overstress'
    weights = '1 -1'
  []
  [smooth]
    type = SoftPlus
    from = 'overstress'
    to = 'effective_overstress'
    sharpness = 0.05
  []
  [flow]
    type = PerzynaPlasticFlowRate
    yield_function = 'effective_overstress'
    flow_rate = 'flow_rate'
    reference_stress = 100
    exponent = 2
  []
  [model]
    type = ComposedModel
    models = 'overstress smooth flow'
  []
[]
