# A tensor from a Python expression: the stiffness of a cubic crystal, filled from its three constants in Mandel notation.
# The expression is evaluated when the model is captured, so what the graph holds, and what it is cached by, is the result.
# Write `2 * C44` as `(C44 + C44)`: the text differs, the graph does not, and nothing is lowered.
[Tensors]
  [stiffness]
    type = Python
    expr = '''
      C11, C12, C44 = 168.4e3, 121.4e3, 75.4e3
      C = torch.zeros(6, 6, dtype=torch.float64)
      C[:3, :3] = C12
      C.fill_diagonal_(C11)
      C[3:, 3:] = 2 * C44 * torch.eye(3, dtype=torch.float64)
      result = SSR4(C)
    '''
  []
[]

[Models]
  [crystal]
    type = GeneralElasticity
    strain = 'strain'
    stress = 'stress'
    orientation = 'orientation'
    elastic_stiffness_tensor = 'stiffness'
  []
[]
