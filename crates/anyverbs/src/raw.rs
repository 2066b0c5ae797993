//! Raw packets: queue pairs that send and receive whole Ethernet frames, and what spreads frames over several receivers.

pub use anyverbs_raw::{
    AesGcm, CounterKind, Direction, Encapsulation, EspAttr, EspError, Filter, Flow, FlowActionEsp,
    FlowAttr, FlowCounters, FlowError, FlowType, FullOffload, HashError, HashFields, HashQpInit,
    KEY_LEN, Layer, MAX_COUNTER_INDEX, MAX_FRAME, MAX_SPECS, MAX_TSO_HEADER, Masked, MplsOver,
    Offload, OuterIp, RawPoster, RawQp, RawQpInit, RawSendWr, ReceiveFlags, Restart, RwqIndTable,
    RxHash, Segmentation, Spec, Wq, WqAttr, WqInit, WqState,
};
