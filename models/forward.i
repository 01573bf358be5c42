# A forward composition: thermal strain, elastic strain, stress and its von Mises invariant, four models one after another.
# However long the chain is, a composition without an implicit part is one graph, and the intermediate tensors vanish.
# The manifest renames an input at the boundary (strain becomes eps): that edits metadata.json, never the graph.
[Models]
  [thermal_strain]
    type = ThermalEigenstrain
    temperature = 'temperature'
    eigenstrain = 'thermal_strain'
    reference_temperature = 293.15
    CTE = 1.2e-5
  []
  [elastic_strain]
    type = SR2LinearCombination
    from = 'strain thermal_strain'
    to = 'elastic_strain'
    weights = '1 -1'
  []
  [elasticity]
    type = LinearIsotropicElasticity
    strain = 'elastic_strain'
    stress = 'stress'
    coefficients = '2.1e5 0.3'
    coefficient_types = 'YOUNGS_MODULUS POISSONS_RATIO'
  []
  [von_mises]
    type = SR2Invariant
    invariant_type = 'VONMISES'
    tensor = 'stress'
    invariant = 'von_mises_stress'
  []
  [thermoelasticity]
    type = ComposedModel
    models = 'thermal_strain elastic_strain elasticity von_mises'
    additional_outputs = 'stress'
  []
[]
