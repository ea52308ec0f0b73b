INSTALL = "pip install 'aligner[vllm]' in an environment without the extra servers (numpy 2)"
