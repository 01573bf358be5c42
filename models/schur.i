# A Schur complement: predator and prey, one unknown group each (the `;` in `unknowns` separates the groups).
# The linear solve eliminates the first group and then solves the small system of the second.
# Compare its `solve` graph with that of implicit.i: `neml2-build show graph schur`.
[Models]
  [encounters]
    type = ScalarMultiplication
    from = 'prey predator'
    to = 'encounters'
    scaling = 0.5
  []
  [prey_growth]
    type = ScalarLinearCombination
    from = 'prey encounters'
    to = 'prey_rate'
    weights = '1.1 -1'
  []
  [predator_growth]
    type = ScalarLinearCombination
    from = 'encounters predator'
    to = 'predator_rate'
    weights = '0.4 -0.6'
  []
  [integrate_prey]
    type = ScalarBackwardEulerTimeIntegration
    variable = 'prey'
  []
  [integrate_predator]
    type = ScalarBackwardEulerTimeIntegration
    variable = 'predator'
  []
  [residual]
    type = ComposedModel
    models = 'encounters prey_growth predator_growth integrate_prey integrate_predator'
  []
[]

[EquationSystems]
  [system]
    type = NonlinearSystem
    model = 'residual'
    unknowns = 'prey ; predator'
    residuals = 'prey_residual ; predator_residual'
  []
[]

[Solvers]
  [lu]
    type = DenseLU
  []
  [schur]
    type = SchurComplement
    residual_primary_group = 0
    unknown_primary_group = 0
    primary_solver = 'lu'
    schur_solver = 'lu'
  []
  [newton]
    type = Newton
    abs_tol = 1e-12
    rel_tol = 1e-12
    max_its = 30
    linear_solver = 'schur'
  []
[]

[Models]
  [model]
    type = ImplicitUpdate
    equation_system = 'system'
    solver = 'newton'
  []
[]
