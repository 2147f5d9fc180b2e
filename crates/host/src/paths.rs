//! Lanes to another host, and how streams on them are opened.

use godwit_lanes::pacing::MigrationPace;
use godwit_lanes::{CONNECT_LIMIT, Carries, Interrupt, Stream};
use godwit_migration::Failure;
use godwit_migration::drive::lane_failure;
use godwit_pki::Identity;
use godwit_types::{FailureCode, Lane};

/// Routes to the destination.
pub(crate) struct Paths {
    pub(crate) lanes: Vec<Lane>,
    /// Name of the destination, which its certificate must contain.
    pub(crate) host: String,
    /// `None`: this host is insecure.
    pub(crate) identity: Option<Identity>,
    /// Bandwidth limits of the data streams.
    pub(crate) pace: MigrationPace,
}

impl Paths {
    pub(crate) fn connect(
        &self,
        lane: Lane,
        carries: Carries,
        interrupt: &Interrupt,
    ) -> Result<Stream, Failure> {
        let connected = interrupt.connect(lane, CONNECT_LIMIT, carries);
        let secured = connected.and_then(|stream| match &self.identity {
            Some(identity) => interrupt.secure(stream, identity, &self.host),
            None => Ok(stream),
        });
        secured.map_err(|error| lane_failure(&error))
    }

    /// Opens a data stream on a lane.
    pub(crate) fn data(
        &self,
        lane: usize,
        carries: Carries,
        interrupt: &Interrupt,
    ) -> Result<Stream, Failure> {
        let none =
            || Failure::new(FailureCode::LaneLost, "the destination returned no lane address");
        let stream = self.connect(*self.lanes.get(lane).ok_or_else(none)?, carries, interrupt)?;
        let near = stream.local().map_err(|error| lane_failure(&error))?;
        Ok(stream.paced(self.pace.stream(near.ip())))
    }
}
