"""The catalogue of causes: mechanism, symptom, remedy, expected damage."""
