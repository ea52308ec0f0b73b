"""DPO on pairs of the policy's own samples. Settings: conf/online_dpo/, then key=value; see --help."""

from aligner.jobs.start import program

main = program("online_dpo")

if __name__ == "__main__":
    main()
