# The smallest solid: isotropic linear elasticity, one leaf model, compiled with its tangent.
# One derivative pair (stress:strain) in the manifest makes two graphs of one: the value, and the Jacobian-vector product,
# from which the loaded model makes Jacobians too. Change E below and rebuild: it is baked into both, both are lowered again.
[Models]
  [elasticity]
    type = LinearIsotropicElasticity
    strain = 'strain'
    stress = 'stress'
    coefficients = '70e3 0.33'
    coefficient_types = 'YOUNGS_MODULUS POISSONS_RATIO'
  []
[]
