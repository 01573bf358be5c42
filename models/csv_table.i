# Data from a file: Young's modulus against temperature comes from modulus.csv, one column an axis of the table.
# The file is an input of the build like the text is: edit a number in it and only the graph of this target is lowered again.
# Note that the elastic law takes its coefficient from another model (`E_of_T`), not from a number.
[Tensors]
  [T_points]
    type = CSVScalar
    csv_file = 'modulus.csv'
    variable = 'temperature'
  []
  [E_points]
    type = CSVScalar
    csv_file = 'modulus.csv'
    variable = 'youngs_modulus'
  []
[]

[Models]
  [E_of_T]
    type = ScalarLinearInterpolation
    argument = 'temperature'
    output = 'E'
    abscissa = 'T_points'
    ordinate = 'E_points'
  []
  [elasticity]
    type = LinearIsotropicElasticity
    strain = 'strain'
    stress = 'stress'
    coefficients = 'E_of_T 0.3'
    coefficient_types = 'YOUNGS_MODULUS POISSONS_RATIO'
  []
  [model]
    type = ComposedModel
    models = 'elasticity'
  []
[]
