# A Maxwell element in rate form: shared by the files that include it, and no target by itself.
[Models]
  [spring]
    type = LinearIsotropicElasticity
    strain = 'elastic_strain'
    stress = 'stress'
    coefficients = '3e3 0.4'
    coefficient_types = 'YOUNGS_MODULUS POISSONS_RATIO'
  []
  [dashpot]
    type = LinearDashpot
    stress = 'stress'
    viscosity = 5e4
  []
[]
