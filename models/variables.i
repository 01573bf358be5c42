# Variables: `${...}` is replaced before the file is read, with values from the manifest or defined above its use.
# The manifest gives `youngs_modulus` and `layers`; `nu` is defined here, above its use.
# One file so serves many targets: add another [[model]] with other values, and what both share is compiled once.
nu = 0.25

[Settings]
  example_batch_shape = '(2; ${layers})'
[]

[Models]
  [laminate]
    type = LinearIsotropicElasticity
    strain = 'strain'
    stress = 'stress'
    coefficients = '${youngs_modulus} ${nu}'
    coefficient_types = 'YOUNGS_MODULUS POISSONS_RATIO'
  []
[]
