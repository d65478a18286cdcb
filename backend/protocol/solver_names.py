"""Names of the solvers, for the nodes' drop-down; standard library only."""

#: In ComfyUI's order.
SOLVERS = tuple(
    "euler euler_cfg_pp euler_ancestral euler_ancestral_cfg_pp heun dpm_2 dpm_2_ancestral lms "
    "dpmpp_2s_ancestral dpmpp_sde dpmpp_2m dpmpp_2m_sde dpmpp_3m_sde ddpm lcm ipndm ipndm_v deis "
    "res_multistep gradient_estimation er_sde seeds_2 seeds_3 sa_solver ddim uni_pc uni_pc_bh2".split()
)
#: Solvers that use the negative prompt's prediction by itself, so that it is evaluated at cfg 1.0 too.
NEEDS_NEGATIVE = frozenset({"euler_cfg_pp", "euler_ancestral_cfg_pp"})
#: Solvers that step in the half log SNR, which has no value at a flow model's first sigma of 1.
HALF_LOG_SNR = frozenset(
    {"dpmpp_sde", "dpmpp_2m_sde", "dpmpp_3m_sde", "er_sde", "seeds_2", "seeds_3", "sa_solver"}
)
#: Solvers whose noise is a Brownian path along the schedule, which must not rise.
BROWNIAN = frozenset({"dpmpp_sde", "dpmpp_2m_sde", "dpmpp_3m_sde"})
#: Those in the half log SNR lower such a sigma to the model's noise level after this part of sampling, and
#: sa_solver is stochastic between two parts.
FIRST_PERCENT = 1e-4
STOCHASTIC_PERCENTS = (0.2, 0.8)
#: A request's percent_sigmas: the model's noise levels after these parts of sampling (ComfyUI's
#: model_sampling.percent_to_sigma).
PERCENTS = (FIRST_PERCENT, *STOCHASTIC_PERCENTS)
