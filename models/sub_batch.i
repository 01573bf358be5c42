# Sub-batched state: one load, shared by six slip systems, each of which has its own strength and hardens by itself.
# `(2; 6)` says: two points in the example batch (free at run time), six sites (fixed in the graph).
# Look at `sub_batch_shape` in the metadata, and change 6 to 12: every graph is another one.
[Settings]
  [example_batch_shape]
    load = '(2,)'
    strength = '(2; 6)'
    strength~1 = '(2; 6)'
    t = '(2,)'
    t~1 = '(2,)'
  []
[]

[Models]
  [slip]
    type = PowerLawSlipRule
    resolved_shears = 'load'
    slip_strengths = 'strength'
    slip_rates = 'slip_rate'
    gamma0 = 1e-3
    n = 5
  []
  [harden]
    type = ScalarLinearCombination
    from = 'slip_rate'
    to = 'strength_rate'
    weights = '400'
  []
  [integrate]
    type = ScalarBackwardEulerTimeIntegration
    variable = 'strength'
  []
  [residual]
    type = ComposedModel
    models = 'slip harden integrate'
  []
[]

[EquationSystems]
  [system]
    type = NonlinearSystem
    model = 'residual'
    unknowns = 'strength'
    residuals = 'strength_residual'
  []
[]

[Solvers]
  [newton]
    type = Newton
    abs_tol = 1e-10
    rel_tol = 1e-12
    max_its = 50
    linear_solver = 'lu'
  []
  [lu]
    type = DenseLU
  []
[]

[Models]
  [seed]
    type = ConstantExtrapolationPredictor
    unknowns_Scalar = 'strength'
  []
  [model]
    type = ImplicitUpdate
    equation_system = 'system'
    solver = 'newton'
    predictor = 'seed'
  []
[]
