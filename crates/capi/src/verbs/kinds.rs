//! The public structs that lead objects, each with the library's part.

use crate::{
    abi::*,
    object::{public, public_without_handle},
    verbs,
};

public! {
    ibv_pd(handle) => verbs::PdInner;
    ibv_mr(handle) => verbs::MrInner;
    ibv_mw(handle) => verbs::MwInner;
    ibv_dm(handle) => verbs::DmInner;
    ibv_ah(handle) => verbs::AhInner;
    // A completion queue is always of the extended kind, even if a plain call made it; so is a queue pair.
    ibv_cq_ex(handle) => verbs::CqInner;
    ibv_qp_ex(qp_base.handle) => verbs::QpInner;
    ibv_srq(handle) => verbs::SrqInner;
    ibv_comp_cntr(handle) => verbs::CompCntrInner;
    ibv_wq(handle) => verbs::WqInner;
    ibv_flow(handle) => verbs::FlowInner;
}

public_without_handle! {
    verbs_context => verbs::ContextInner;
    ibv_comp_channel => verbs::CompChannelInner;
    ibv_xrcd => verbs::XrcdInner;
    ibv_td => verbs::TdInner;
    ibv_dmah => verbs::DmahInner;
    ibv_buf => verbs::BufInner;
    ibv_rwq_ind_table => verbs::RwqIndTableInner;
    ibv_counters => verbs::CountersInner;
    ibv_flow_action => verbs::FlowActionInner;
}
