# J2 viscoplasticity the way programs use it: thermal strain (forward), return mapping (implicit), stress (forward).
# NEML2 cuts the composition at the implicit part into three segments, 1 + 4 + 1 graphs, each lowered and cached apart.
# Change CTE and rebuild: `neml2-build explain viscoplasticity` shows that only the first segment is lowered again.
[Models]
  [thermal_strain]
    type = ThermalEigenstrain
    temperature = 'temperature'
    eigenstrain = 'thermal_strain'
    reference_temperature = 300
    CTE = 1.1e-5
  []
  [mechanical_strain]
    type = SR2LinearCombination
    from = 'strain thermal_strain'
    to = 'mechanical_strain'
    weights = '1 -1'
  []
  [elastic_strain]
    type = SR2LinearCombination
    from = 'mechanical_strain plastic_strain'
    to = 'elastic_strain'
    weights = '1 -1'
  []
  [elasticity]
    type = LinearIsotropicElasticity
    strain = 'elastic_strain'
    stress = 'stress'
    coefficients = '1.8e5 0.29'
    coefficient_types = 'YOUNGS_MODULUS POISSONS_RATIO'
  []
[]

# What the return mapping makes zero: the plastic strain and its equivalent, integrated by backward Euler.
[Models]
  [mandel]
    type = IsotropicMandelStress
    cauchy_stress = 'stress'
  []
  [equivalent_stress]
    type = SR2Invariant
    invariant_type = 'VONMISES'
    tensor = 'mandel_stress'
    invariant = 'effective_stress'
  []
  [hardening]
    type = LinearIsotropicHardening
    hardening_modulus = 2000
  []
  [yield_law]
    type = YieldFunction
    yield_stress = 150
    isotropic_hardening = 'isotropic_hardening'
  []
  [yield_surface]
    type = ComposedModel
    models = 'equivalent_stress yield_law'
  []
  [normality]
    type = Normality
    model = 'yield_surface'
    function = 'yield_function'
    from = 'mandel_stress isotropic_hardening'
    to = 'flow_direction isotropic_hardening_direction'
  []
  [flow_rate]
    type = PerzynaPlasticFlowRate
    reference_stress = 80
    exponent = 4
  []
  [plastic_flow]
    type = AssociativePlasticFlow
  []
  [hardening_flow]
    type = AssociativeIsotropicPlasticHardening
  []
  [integrate_plastic]
    type = SR2BackwardEulerTimeIntegration
    variable = 'plastic_strain'
  []
  [integrate_hardening]
    type = ScalarBackwardEulerTimeIntegration
    variable = 'equivalent_plastic_strain'
  []
  [residual]
    type = ComposedModel
    models = 'elastic_strain elasticity mandel equivalent_stress hardening yield_law normality flow_rate
              plastic_flow hardening_flow integrate_plastic integrate_hardening'
  []
[]

[EquationSystems]
  [system]
    type = NonlinearSystem
    model = 'residual'
    unknowns = 'plastic_strain equivalent_plastic_strain'
  []
[]

[Solvers]
  [newton]
    type = Newton
    abs_tol = 1e-12
    rel_tol = 1e-12
    max_its = 50
    linear_solver = 'lu'
  []
  [lu]
    type = DenseLU
  []
[]

[Models]
  [seed]
    type = ConstantExtrapolationPredictor
    unknowns_SR2 = 'plastic_strain'
    unknowns_Scalar = 'equivalent_plastic_strain'
  []
  [return_map]
    type = ImplicitUpdate
    equation_system = 'system'
    solver = 'newton'
    predictor = 'seed'
  []
  [model]
    type = ComposedModel
    models = 'thermal_strain mechanical_strain return_map elastic_strain elasticity'
    additional_outputs = 'plastic_strain equivalent_plastic_strain'
  []
[]
