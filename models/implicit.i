# An implicit update: stress relaxes at fixed strain by power-law creep, integrated by backward Euler, solved by Newton
# with a dense LU. An implicit update is three graphs (residual, Jacobian, linear solve); the Newton loop itself is C++.
# Change a tolerance of [newton]: it is written into metadata.json, and no graph is lowered again.
[Models]
  [creep]
    type = PerzynaPlasticFlowRate
    yield_function = 'stress'
    flow_rate = 'creep_rate'
    reference_stress = 120
    exponent = 3
  []
  [relaxation]
    type = ScalarLinearCombination
    from = 'creep_rate'
    to = 'stress_rate'
    weights = '-1000'
  []
  [integrate]
    type = ScalarBackwardEulerTimeIntegration
    variable = 'stress'
  []
  [residual]
    type = ComposedModel
    models = 'creep relaxation integrate'
  []
[]

[EquationSystems]
  [system]
    type = NonlinearSystem
    model = 'residual'
    unknowns = 'stress'
    residuals = 'stress_residual'
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
  [model]
    type = ImplicitUpdate
    equation_system = 'system'
    solver = 'newton'
  []
[]
