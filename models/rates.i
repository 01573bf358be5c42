# Three rates that share a denominator: each is (v - v~1) / (t - t~1), and all three use the same time step.
# The graph computes t - t~1 once, because the optimizer of torch sees the composition as a whole.
# Look at the generated code: `neml2-build show kernel rates`.
[Models]
  [eq1]
    type = ScalarVariableRate
    variable = 'a'
  []
  [eq2]
    type = ScalarVariableRate
    variable = 'b'
  []
  [eq3]
    type = ScalarVariableRate
    variable = 'c'
  []
  [eq]
    type = ComposedModel
    models = 'eq1 eq2 eq3'
  []
[]
