//! rsockets.
#![allow(dead_code)]
mod machine;
mod wire;
