//! The names that most programs use: `use anyverbs::prelude::*;`.

pub use crate::endpoint::Endpoint;
pub use crate::{
    Access, Ah, CompChannel, Context, Cq, CqExt, Gid, Memory, Mr, MrExt, Pd, PdExt, Qp, QpCap,
    QpExt, QpInitAttr, QpState, QpType, RecvWr, Region, RemoteSlice, SendFlags, SendOp, SendWr,
    Sge, Slice, Srq, Verbs, Wc, WcOpcode, WcStatus,
};
