# A driver target: the manifest names the driver, the build finds the model that it drives, and the stub keeps the driver,
# so that `neml2-run aoti/creep_aoti.i driver` runs the compiled model with the same loading.
# Edit the loading: only the stub is written again.
[Tensors]
  [times]
    type = Python
    expr = 'Scalar(torch.linspace(0.0, 100.0, 21, dtype=torch.float64))'
  []
  [held_stress]
    type = Python
    expr = 'SR2(torch.tensor([80.0, 0.0, 0.0, 0.0, 0.0, 15.0], dtype=torch.float64).expand(21, 6))'
  []
[]

[Drivers]
  [driver]
    type = TransientDriver
    model = 'creep'
    prescribed_time = 'times'
    prescribed_SR2_names = 'stress'
    prescribed_SR2_values = 'held_stress'
  []
[]

[Models]
  [dashpot]
    type = LinearDashpot
    stress = 'stress'
    viscosity = 2e5
  []
  [integrate]
    type = SR2ForwardEulerTimeIntegration
    variable = 'viscous_strain'
  []
  [creep]
    type = ComposedModel
    models = 'dashpot integrate'
  []
[]
