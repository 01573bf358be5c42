# Derivatives with respect to a parameter, through an implicit solve: what a gradient-based calibration needs.
# The manifest promotes the rate constant and asks for all derivatives of x; the implicit function theorem adds graphs for them.
# Look at `parameter_derivatives` in the metadata, and at `param_jacobian` of the loaded model.
[Models]
  [decay]
    type = ScalarLinearCombination
    from = 'x source'
    to = 'x_rate'
    weights = '-0.8 1'
  []
  [integrate]
    type = ScalarBackwardEulerTimeIntegration
    variable = 'x'
  []
  [residual]
    type = ComposedModel
    models = 'decay integrate'
  []
[]

[EquationSystems]
  [system]
    type = NonlinearSystem
    model = 'residual'
    unknowns = 'x'
    residuals = 'x_residual'
  []
[]

[Solvers]
  [newton]
    type = Newton
    abs_tol = 1e-12
    rel_tol = 1e-12
    max_its = 30
    linear_solver = 'lu'
  []
  [lu]
    type = DenseLU
  []
[]

[Models]
  [model]
    type = ImplicitUpdate
    equation_system = 'system'
    solver = 'newton'
  []
[]
