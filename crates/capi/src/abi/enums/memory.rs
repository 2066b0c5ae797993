//! Memory registration and domains.

use super::*;

pub(crate) type ibv_dm_mask = c_uint;
pub(crate) const IBV_DM_MASK_HANDLE: ibv_dm_mask = 1;

pub(crate) type ibv_access_flags = c_uint;
pub(crate) const IBV_ACCESS_LOCAL_WRITE: ibv_access_flags = 1;
pub(crate) const IBV_ACCESS_REMOTE_WRITE: ibv_access_flags = 2;
pub(crate) const IBV_ACCESS_REMOTE_READ: ibv_access_flags = 4;
pub(crate) const IBV_ACCESS_REMOTE_ATOMIC: ibv_access_flags = 8;
pub(crate) const IBV_ACCESS_MW_BIND: ibv_access_flags = 16;
pub(crate) const IBV_ACCESS_ZERO_BASED: ibv_access_flags = 32;
pub(crate) const IBV_ACCESS_ON_DEMAND: ibv_access_flags = 64;
pub(crate) const IBV_ACCESS_HUGETLB: ibv_access_flags = 128;
pub(crate) const IBV_ACCESS_FLUSH_GLOBAL: ibv_access_flags = 256;
pub(crate) const IBV_ACCESS_FLUSH_PERSISTENT: ibv_access_flags = 512;
pub(crate) const IBV_ACCESS_RELAXED_ORDERING: ibv_access_flags = 1048576;

pub(crate) type ibv_xrcd_init_attr_mask = c_uint;
pub(crate) const IBV_XRCD_INIT_ATTR_FD: ibv_xrcd_init_attr_mask = 1;
pub(crate) const IBV_XRCD_INIT_ATTR_OFLAGS: ibv_xrcd_init_attr_mask = 2;
pub(crate) const IBV_XRCD_INIT_ATTR_RESERVED: ibv_xrcd_init_attr_mask = 4;

pub(crate) type ibv_rereg_mr_flags = c_uint;
pub(crate) const IBV_REREG_MR_CHANGE_TRANSLATION: ibv_rereg_mr_flags = 1;
pub(crate) const IBV_REREG_MR_CHANGE_PD: ibv_rereg_mr_flags = 2;
pub(crate) const IBV_REREG_MR_CHANGE_ACCESS: ibv_rereg_mr_flags = 4;
pub(crate) const IBV_REREG_MR_FLAGS_SUPPORTED: ibv_rereg_mr_flags = 7;

pub(crate) type ibv_mr_init_attr_mask = c_uint;
pub(crate) const IBV_REG_MR_MASK_ADDR: ibv_mr_init_attr_mask = 2;
pub(crate) const IBV_REG_MR_MASK_FD: ibv_mr_init_attr_mask = 4;
pub(crate) const IBV_REG_MR_MASK_FD_OFFSET: ibv_mr_init_attr_mask = 8;
pub(crate) const IBV_REG_MR_MASK_DMAH: ibv_mr_init_attr_mask = 16;
pub(crate) const IBV_REG_MR_MASK_BUF: ibv_mr_init_attr_mask = 32;

pub(crate) type ibv_mw_type = c_uint;
pub(crate) const IBV_MW_TYPE_1: ibv_mw_type = 1;
pub(crate) const IBV_MW_TYPE_2: ibv_mw_type = 2;

pub(crate) type ibv_parent_domain_init_attr_mask = c_uint;
pub(crate) const IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS: ibv_parent_domain_init_attr_mask = 1;
pub(crate) const IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT: ibv_parent_domain_init_attr_mask = 2;
pub(crate) const IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC:
    ibv_parent_domain_init_attr_mask = 4;

pub(crate) type ibv_tph_mem_type = c_uint;
pub(crate) const IBV_TPH_MEM_TYPE_VM: ibv_tph_mem_type = 0;
pub(crate) const IBV_TPH_MEM_TYPE_PM: ibv_tph_mem_type = 1;

pub(crate) type ibv_dmah_init_attr_mask = c_uint;
pub(crate) const IBV_DMAH_INIT_ATTR_MASK_CPU_ID: ibv_dmah_init_attr_mask = 1;
pub(crate) const IBV_DMAH_INIT_ATTR_MASK_PH: ibv_dmah_init_attr_mask = 2;
pub(crate) const IBV_DMAH_INIT_ATTR_MASK_TPH_MEM_TYPE: ibv_dmah_init_attr_mask = 4;

pub(crate) type ibv_rereg_mr_err_code = c_int;
pub(crate) const IBV_REREG_MR_ERR_INPUT: ibv_rereg_mr_err_code = -1;
pub(crate) const IBV_REREG_MR_ERR_DONT_FORK_NEW: ibv_rereg_mr_err_code = -2;
pub(crate) const IBV_REREG_MR_ERR_DO_FORK_OLD: ibv_rereg_mr_err_code = -3;
pub(crate) const IBV_REREG_MR_ERR_CMD: ibv_rereg_mr_err_code = -4;
pub(crate) const IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW: ibv_rereg_mr_err_code = -5;
