# Promoted parameters: E and nu become inputs of the graph, so a calibration changes them without compiling anything.
# The manifest promotes `elasticity.E` and `elasticity.nu` and asks for the tangent, which then depends on them too.
# Change E below and rebuild: only its initial value in metadata.json changes, and nothing is lowered.
[Models]
  [elasticity]
    type = LinearIsotropicElasticity
    strain = 'strain'
    stress = 'stress'
    coefficients = '1.2e5 0.34'
    coefficient_types = 'YOUNGS_MODULUS POISSONS_RATIO'
  []
  [mandel]
    type = IsotropicMandelStress
    cauchy_stress = 'stress'
    mandel_stress = 'mandel_stress'
  []
  [model]
    type = ComposedModel
    models = 'elasticity mandel'
  []
[]
