"""Convert a 4-bit AWQ model to the layout of the Marlin kernels. Pagewick cannot do this yet, and says so."""

from convert_marlin import main

if __name__ == "__main__":
    main()
