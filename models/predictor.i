# A predictor: Newton starts from the line through the last two steps instead of from zero.
# The predictor is one more graph beside the three of the implicit update; it needs the time and the state two steps back.
# Replace it by a ConstantExtrapolationPredictor and rebuild: one graph is lowered, the other three are reused.
[Models]
  [hardening]
    type = VoceIsotropicHardening
    equivalent_plastic_strain = 'ep'
    saturated_hardening = 90
    saturation_rate = 12
  []
  [yield_law]
    type = YieldFunction
    effective_stress = 'load'
    isotropic_hardening = 'isotropic_hardening'
    yield_stress = 60
  []
  [flow]
    type = PerzynaPlasticFlowRate
    flow_rate = 'ep_rate'
    reference_stress = 200
    exponent = 3
  []
  [integrate]
    type = ScalarBackwardEulerTimeIntegration
    variable = 'ep'
  []
  [residual]
    type = ComposedModel
    models = 'hardening yield_law flow integrate'
  []
[]

[EquationSystems]
  [system]
    type = NonlinearSystem
    model = 'residual'
    unknowns = 'ep'
    residuals = 'ep_residual'
  []
[]

[Solvers]
  [newton]
    type = Newton
    abs_tol = 1e-13
    rel_tol = 1e-12
    max_its = 50
    linear_solver = 'lu'
  []
  [lu]
    type = DenseLU
  []
[]

[Models]
  [extrapolate]
    type = LinearExtrapolationPredictor
    unknowns_Scalar = 'ep'
  []
  [model]
    type = ImplicitUpdate
    equation_system = 'system'
    solver = 'newton'
    predictor = 'extrapolate'
  []
[]
