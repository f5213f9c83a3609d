"""Other products' import names on top of Paceline: installed on request, never over a real package.

python -m paceline.compat --install perseus|tiacc_training [--target DIR]
python -m paceline.compat --uninstall NAME [--target DIR]
python -m paceline.compat --list
"""
