# An include: the material comes from include/maxwell.i, this file only says what is made of it.
# An included file is watched like the file itself; editing its comment runs parse and nothing else.
# Paths are relative to the file that includes.
!include include/maxwell.i

[Models]
  [elastic_strain]
    type = SR2LinearCombination
    from = 'strain viscous_strain'
    to = 'elastic_strain'
    weights = '1 -1'
  []
  [maxwell]
    type = ComposedModel
    models = 'elastic_strain spring dashpot'
    additional_outputs = 'stress'
  []
[]
