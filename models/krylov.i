# A matrix-free Krylov solver: three reacting species, Newton with GMRES instead of a factorization.
# No Jacobian is assembled for the solve: GMRES calls a Jacobian-vector product graph, and the preconditioner is a graph too.
# Look at which graphs replace `jacobian` and `solve` of implicit.i: `neml2-build show metadata krylov`.
[Models]
  [collision]
    type = ScalarMultiplication
    from = 'b c'
    to = 'collision'
    scaling = 3
  []
  [a_source]
    type = ScalarLinearCombination
    from = 'a collision'
    to = 'a_rate'
    weights = '-0.4 1'
  []
  [b_source]
    type = ScalarLinearCombination
    from = 'a collision b'
    to = 'b_rate'
    weights = '0.4 -1 -0.2'
  []
  [c_source]
    type = ScalarLinearCombination
    from = 'b'
    to = 'c_rate'
    weights = '0.2'
  []
  [integrate_a]
    type = ScalarBackwardEulerTimeIntegration
    variable = 'a'
  []
  [integrate_b]
    type = ScalarBackwardEulerTimeIntegration
    variable = 'b'
  []
  [integrate_c]
    type = ScalarBackwardEulerTimeIntegration
    variable = 'c'
  []
  [residual]
    type = ComposedModel
    models = 'collision a_source b_source c_source integrate_a integrate_b integrate_c'
  []
[]

[EquationSystems]
  [system]
    type = NonlinearSystem
    model = 'residual'
    unknowns = 'a b c'
    residuals = 'a_residual b_residual c_residual'
  []
[]

[Solvers]
  [newton]
    type = Newton
    abs_tol = 1e-12
    rel_tol = 1e-12
    max_its = 50
    linear_solver = 'gmres'
  []
  [gmres]
    type = GMRES
    abs_tol = 1e-13
    rel_tol = 1e-6
    preconditioner = 'block_jacobi'
  []
  [block_jacobi]
    type = BlockJacobiPreconditioner
  []
[]

[Models]
  [model]
    type = ImplicitUpdate
    equation_system = 'system'
    solver = 'newton'
  []
[]
