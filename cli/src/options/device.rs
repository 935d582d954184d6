//! Devices.

use microscale::{Device, DeviceChoice, Error};

use crate::streams::warn;

/// Makes a device ready. That there is no GPU is no news, but one that fails is, even where the CPU can do
/// the work.
pub(crate) fn device(choice: DeviceChoice) -> anyhow::Result<Device> {
    if choice != DeviceChoice::Auto {
        return Ok(Device::choose(choice)?);
    }
    let (device, refused) = Device::auto();
    if let Some(error @ Error::Gpu { .. }) = refused {
        warn(format_args!("warning: the CPU is used, because {error}"));
    }
    Ok(device)
}
