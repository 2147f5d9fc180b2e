//! Bandwidth limits of outgoing migrations: those of the configuration, and changes by an operator.
//! A change lasts until the agent ends; the agent never writes the configuration.

use std::net::IpAddr;

use godwit_api::{ApiError, ErrorCode, LimitOf, Limits};
use godwit_lanes::pacing::{MigrationPace, Pacing};
use godwit_types::RateLimit;
use parking_lot::{Mutex, MutexGuard};

use crate::config::Config;

/// Bandwidth limits of one host.
#[derive(Debug)]
pub struct HostLimits {
    host: String,
    /// Source addresses of lanes; empty: the kernel chooses.
    addresses: Vec<IpAddr>,
    pacing: Pacing,
    /// Limit of new migrations that request none.
    migration: Mutex<RateLimit>,
}

impl HostLimits {
    /// Creates the limits that the configuration sets.
    pub(crate) fn new(config: &Config) -> Self {
        let pacing = Pacing::default();
        pacing.limit_host(config.limits.host);
        for (address, limit) in &config.limits.lanes {
            pacing.limit_lane(*address, *limit);
        }
        HostLimits {
            host: config.name.clone(),
            addresses: config.migration_addresses.clone(),
            pacing,
            migration: Mutex::new(config.limits.migration),
        }
    }

    /// Returns the current limits.
    #[must_use]
    pub fn show(&self) -> Limits {
        Limits {
            host: self.pacing.host_limit(),
            migration: *self.each_migration(),
            lanes: self.pacing.lane_limits(),
        }
    }

    /// Sets one limit. It applies to running migrations at once, except the default limit, which
    /// applies to new migrations only.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`]: the address is not a lane address of this host.
    pub fn set(&self, of: LimitOf, limit: RateLimit) -> Result<Limits, ApiError> {
        match of {
            LimitOf::Host => self.pacing.limit_host(limit),
            LimitOf::Migration => *self.each_migration() = limit,
            LimitOf::Lane(address) => {
                self.check(address)?;
                self.pacing.limit_lane(address, limit);
            }
        }
        tracing::info!(?of, %limit, "bandwidth limit set");
        Ok(self.show())
    }

    /// Returns the pace of a new migration; without a requested limit, the default limit applies.
    pub(crate) fn migration(&self, asked: Option<RateLimit>) -> MigrationPace {
        let limit = asked.unwrap_or_else(|| *self.each_migration());
        self.pacing.migration(limit)
    }

    fn check(&self, address: IpAddr) -> Result<(), ApiError> {
        if self.addresses.is_empty() || self.addresses.contains(&address.to_canonical()) {
            return Ok(());
        }
        let known: Vec<String> = self.addresses.iter().map(IpAddr::to_string).collect();
        Err(ApiError::new(
            ErrorCode::NotFound,
            format!("host {} has no lane with the address {address}", self.host),
            format!("use one of its migration_addresses: {}", known.join(", ")),
        ))
    }

    fn each_migration(&self) -> MutexGuard<'_, RateLimit> {
        self.migration.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const CONFIG: &str = r#"
        name = "a"
        migration_addresses = ["10.0.0.1", "fd77::1"]
        [limits]
        host = "5gbit"
        migration = "2gbit"
        [limits.lanes]
        "10.0.0.1" = "1gbit"
    "#;

    fn limits() -> HostLimits {
        HostLimits::new(&Config::parse(CONFIG, Path::new("host.toml")).unwrap())
    }

    fn rate(text: &str) -> RateLimit {
        text.parse().unwrap()
    }

    #[test]
    fn the_configured_limits_apply_until_they_are_changed() {
        let limits = limits();
        let shown = limits.show();
        assert_eq!((shown.host, shown.migration), (rate("5gbit"), rate("2gbit")));
        assert_eq!(shown.lanes[&IpAddr::from([10, 0, 0, 1])], rate("1gbit"));
        let (named, unnamed) = (limits.migration(Some(RateLimit::NONE)), limits.migration(None));
        assert_eq!((named.limit(), unnamed.limit()), (RateLimit::NONE, rate("2gbit")));
        let shown = limits.set(LimitOf::Host, rate("1gbit")).unwrap();
        assert_eq!(shown.host, rate("1gbit"));
        assert_eq!(named.holding(), rate("1gbit").rate(), "running migrations follow at once");
        limits.set(LimitOf::Migration, RateLimit::NONE).unwrap();
        assert_eq!(limits.migration(None).limit(), RateLimit::NONE);
        assert_eq!(unnamed.limit(), rate("2gbit"), "the default applies to new migrations only");
        assert!(
            limits
                .set(LimitOf::Lane("10.0.0.1".parse().unwrap()), RateLimit::NONE)
                .unwrap()
                .lanes
                .is_empty()
        );
    }

    #[test]
    fn an_unknown_lane_is_refused() {
        let limits = limits();
        let refused =
            limits.set(LimitOf::Lane("10.0.0.9".parse().unwrap()), rate("1gbit")).unwrap_err();
        assert_eq!(refused.code, ErrorCode::NotFound);
        assert!(
            refused.to_string().contains("10.0.0.9") && refused.remedy.contains("fd77::1"),
            "{refused}"
        );
        limits.set(LimitOf::Lane("fd77::1".parse().unwrap()), rate("1gbit")).unwrap();
    }
}
