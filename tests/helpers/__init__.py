"""What tests share: small random models, their assembly into a runner, and kernel test conditions."""
